"""Layers of different shapes in one pool: no two share an element, and kernels find each layer's keys where they were put."""

import numpy as np
import pytest
import torch

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from paged_kernels.reference import ReferenceBackend
from svc_common.errors import ConfigError
from worker_svc.model.attention import LayerCall, PagedAttention, caches_of
from worker_svc.model.cache.cache_groups import groups_of, one_group
from worker_svc.model.cache.layer_cache import pool_layers

SIZE, NUM_BLOCKS, NUM_TOKENS, GROUP = 4, 6, 10, 3
RULE = AttentionRule(0.25)


def call_of(layer: int, shape: CacheShape, window: int | None, source: int | None = None) -> LayerCall:
    heads = shape.num_kv_heads * GROUP
    sinks = torch.linspace(-2, 2, heads) if layer % 2 else None
    rule = AttentionRule(0.25, window, sinks=sinks)
    return LayerCall(layer, "", heads, shape.num_kv_heads, shape.head_dim, rule, "", source)


CUT = {0: CacheShape(SIZE, 2, 16), 1: CacheShape(SIZE, 4, 8), 2: CacheShape(SIZE, 1, 8), 3: CacheShape(SIZE, 1, 8)}
SHARED = {0: CacheShape(SIZE, 1, 16), **{layer: CacheShape(SIZE, 1, 8) for layer in (1, 2, 3)}}


@pytest.mark.parametrize("windows", [{}, {1: 8, 2: 8}, {0: 8, 2: 5}], ids=["one table", "a window", "two windows"])
@pytest.mark.parametrize("shapes", [CUT, SHARED], ids=["cut", "shared"])
def test_layers_share_no_element(shapes, windows):
    """Attention of each layer over the pool of all is attention over a pool of its own, with NaN where nothing was written."""
    of_layers = {layer: windows.get(layer) for layer in shapes}
    layers = pool_layers(shapes, of_layers, torch.float32)
    groups = groups_of(layers.windows, SIZE, 64) if windows else one_group(list(layers.windows))
    calls = [call_of(layer, shape, of_layers[layer]) for layer, shape in shapes.items()]
    num_groups = len(groups.windows)
    sizes = (groups.num_layers, 2, NUM_BLOCKS * num_groups, layers.shape.block_elements(torch.float32))
    pool, backend = torch.full(sizes, torch.nan), ReferenceBackend()
    paged = PagedAttention(backend, pool, caches_of(calls, shapes, layers, groups))
    batches = [batch_of(np.array([[5, 2, 3]]) * num_groups + group) for group in range(num_groups)]
    drawn = {layer: torch.randn(3, 1, 12, NUM_TOKENS + 1, shape.head_dim) for layer, shape in shapes.items()}
    # All layers write before any is read back: one that writes into another's room is seen.
    for again in range(2):
        paged.begin(batches)
        for call in calls:
            shape, (query, key, value) = shapes[call.layer], drawn[call.layer]
            key, value = key[:, : shape.num_kv_heads], value[:, : shape.num_kv_heads]
            query = query[:, : call.num_heads]
            found = paged.call(Module(call.layer), query, key, value, None, {"scaling": 0.25} | options(call))
            if again:
                assert found.equal(alone(backend, call, shape, query, key, value))


def options(call: LayerCall) -> dict[str, object]:
    return {} if call.rule.sliding_window is None else {"sliding_window": call.rule.sliding_window}


class Module(torch.nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


def batch_of(table: np.ndarray) -> AttentionBatch:
    """Ten tokens of one sequence, and one of padding."""
    positions = torch.arange(NUM_TOKENS + 1, dtype=torch.int32)
    tables = torch.from_numpy(table).int()
    slots = tables[0, positions[:-1] // SIZE].long() * SIZE + positions[:-1] % SIZE
    slots = torch.cat([slots, torch.tensor([-1])])
    offsets = np.array([0, NUM_TOKENS], np.int32)
    return AttentionBatch(torch.zeros(NUM_TOKENS + 1, dtype=torch.int32), positions, slots, tables, offsets)


def alone(backend, call, shape, query, key, value) -> torch.Tensor:
    pool, batch = (
        torch.full((2, NUM_BLOCKS, shape.block_elements(torch.float32)), torch.nan),
        batch_of(np.array([[5, 2, 3]])),
    )
    query, key, value = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    backend.write_kv(key, value, pool, batch.slots, shape)
    return backend.paged_attention(query, pool, batch, shape, call.rule)[None]


def test_a_layer_that_reads_anothers_keys_writes_none():
    shapes = {0: CacheShape(SIZE, 2, 8)}
    layers = pool_layers(shapes, {0: None}, torch.float32)
    calls = [call_of(0, shapes[0], None), call_of(2, shapes[0], None, source=0)]
    caches = caches_of(calls, shapes, layers, one_group([0]))
    assert [cache.writes for cache in (*caches[0], *caches[2])] == [True, False]
    assert caches[0][0].place == caches[2][0].place


def test_parts_waste_nothing():
    """Twice the kv heads are two layers; heads half as wide that cannot be divided share one."""
    cut = pool_layers({0: CacheShape(16, 8, 256), 1: CacheShape(16, 2, 512)}, {0: 1024, 1: None}, torch.bfloat16)
    assert (cut.shape, cut.windows) == (CacheShape(16, 2, 512), {0: 1024, 1: 1024, 2: None})
    shared = pool_layers(
        {0: CacheShape(16, 1, 256), 1: CacheShape(16, 1, 512), 2: CacheShape(16, 1, 256)},
        {0: 512, 1: None, 2: 512},
        torch.bfloat16,
    )
    assert (shared.shape, shared.windows) == (CacheShape(16, 1, 512), {0: 512, 1: None})
    assert shared.spots[2][0] == (0, 1, 2)


def test_equal_shapes_keep_their_numbers():
    shape = CacheShape(16, 2, 64)
    assert pool_layers({3: shape, 4: shape}, {3: None, 4: 9}, torch.float32).windows == {3: None, 4: 9}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_that_do_not_divide_are_refused(dtype):
    windows = {0: None, 1: 8}
    with pytest.raises(ConfigError, match="--kv-cache-dtype auto"):
        pool_layers({0: CacheShape(16, 4, 512), 1: CacheShape(16, 4, 256)}, windows, dtype)
    assert len(pool_layers({0: CacheShape(16, 4, 64), 1: CacheShape(16, 2, 64)}, windows, dtype).windows) == 3


def test_shapes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="different shapes"):
        pool_layers({0: CacheShape(16, 3, 8), 1: CacheShape(16, 2, 8)}, {0: None, 1: None}, torch.float32)
