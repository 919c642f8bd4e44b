"""The cache engine: what is swapped is what was there, what is stored in another dtype, what is refused."""

import itertools
import time

import pytest
import torch
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from paged_kernels.backend import CacheShape, scale_bytes, written_dtype
from paged_kernels.reference import loaded, stored
from svc_common.errors import ConfigError
from tests.kernels.programs import full_of_nan
from tests.support.checkpoints import make_checkpoint
from tests.support.cuda import NEEDS_INVARIANCE
from tests.support.worker.driver import BLOCK_SIZE, Driver, generate, make_engine
from tests.support.worker.generated import greedy, reference_model
from tests.worker.engine.test_invariance import QUICK_SEEDS, check_schedules
from worker_svc.device.devices import HOST
from worker_svc.model.cache.cache_engine import CacheEngine
from worker_svc.settings import WorkerSettings

PROMPT = list(b"The quick brown fox jumps over the lazy dog, and then sits down to think.")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "llama")


# --- swap ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp8"])
def test_swapped_bytes_are_those_of_the_device(path, dtype):
    """R122, R123: after a step that swaps out, the host holds bit for bit what the device held, over all layers; and back again."""
    engine = make_engine(path, kv_cache_dtype=dtype)
    driver = Driver(engine)
    row = driver.add("p", PROMPT, room=1)
    driver.run()
    # Bytes: torch does not compare E4M3 numbers.
    device = engine.cache.device_pool.view(torch.uint8)
    before = device[:, :, row.blocks].clone()
    assert before.any(dim=-1).all()
    driver.remove("p")
    hosts = [7, 3, 30, 11, 0][: len(row.blocks)]
    driver.step.swap_out = list(zip(row.blocks, hosts, strict=True))
    driver.run()
    assert torch.equal(engine.cache.host_pool.view(torch.uint8)[:, :, hosts], before.cpu())
    engine.cache.device_pool.copy_(full_of_nan(engine.cache.device_pool.shape, engine.cache.device_pool.dtype))
    back = [100 + 2 * i for i in range(len(hosts))]
    driver.step.swap_in = list(zip(hosts, back, strict=True))
    driver.add("p", row.token_ids, num_prompt=len(PROMPT), blocks=back, computed=row.computed)
    driver.run()
    written = row.computed % BLOCK_SIZE
    assert torch.equal(device[:, :, back[:-1]], before[:, :, :-1])
    assert written, "the last block was to be written to by the step"
    assert driver.tokens["p"] == generate(Driver(engine), "p", PROMPT, 2)


def rate(num_bytes: int, move) -> float:
    """GB/s of the fastest of a few."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        move()
        times.append(time.perf_counter() - begin)
    return num_bytes / min(times) / 1e9


def test_swap_beside_a_plain_copy(record_property):
    """R123: scattered blocks of all layers in one move, bit for bit; how fast, beside a plain copy of the same bytes."""
    sizes = CacheShape(16, 8, 64)
    cache = CacheEngine(sizes, num_layers=4, num_gpu_blocks=192, num_cpu_blocks=96, dtype=torch.float32, device=HOST)
    cache.device_pool.normal_(generator=torch.Generator().manual_seed(0))
    order = torch.randperm(192, generator=torch.Generator().manual_seed(1)).tolist()
    blocks, hosts = order[:96], [block % 96 for block in range(50, 146)]
    pairs = list(zip(blocks, hosts, strict=True))
    before = cache.device_pool[:, :, blocks].clone()
    plain = torch.empty_like(before)
    rates = [
        rate(before.nbytes, lambda: cache.swap_out(pairs)),
        rate(before.nbytes, lambda: cache.swap_in([(host, device) for device, host in pairs])),
        rate(before.nbytes, lambda: plain.copy_(before)),
    ]
    assert torch.equal(cache.host_pool[:, :, hosts], before)
    assert torch.equal(cache.device_pool[:, :, blocks], before)
    words = "{:.1f} GB/s out, {:.1f} GB/s in, {:.1f} GB/s plain copy".format(*rates)
    record_property("size", f"swap on cpu: {len(pairs)} blocks, {before.nbytes / 2**20:.0f} MiB: {words}")


# --- dtype -----------------------------------------------------------------------------------------------------------


def rounding(dtype):
    """Attention as transformers has it, but of keys and values rounded to `dtype`: the oracle of a cache of that dtype."""

    def forward(module, query, key, value, mask, **options):
        kept = [loaded(stored(x.to(written_dtype(dtype)), dtype)) for x in (key, value)]
        return sdpa_attention_forward(module, query, *kept, mask, **options)

    return forward


@pytest.fixture(scope="module")
def wanted(path):
    """Of the exact model."""
    return greedy(reference_model(path), PROMPT, 16)


@pytest.fixture(scope="module")
def block_bytes(path):
    """Of a cache in float32."""
    return make_engine(path)._loaded.block_bytes


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def rounded(path, dtype):
    """Of the model whose keys and values are rounded to `dtype`."""
    AttentionInterface.register("quire_test_rounding", rounding(dtype))
    AttentionMaskInterface.register("quire_test_rounding", sdpa_mask)
    model = reference_model(path)
    model.set_attn_implementation("quire_test_rounding")
    return greedy(model, PROMPT, 16)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_a_smaller_cache(path, dtype, backend, block_bytes, wanted, rounded, monkeypatch):
    """Fewer bytes; results are those of a model whose keys and values are rounded so, not of the exact one."""
    if backend == "torch":
        monkeypatch.setenv("QUIRE_CPU_KERNELS", "torch")
    name = "fp8" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")
    kernels = "reference" if backend == "reference" else "cpu"
    engine = make_engine(path, kv_cache_dtype=name, backend=kernels)
    assert engine.cache.device_pool.dtype == engine.cache.host_pool.dtype == dtype
    head_dim = engine.cache.shape.head_dim
    share = (dtype.itemsize * head_dim + scale_bytes(dtype)) / (4 * head_dim)
    assert engine._loaded.block_bytes == block_bytes * share
    assert engine._loaded.block_bytes == engine.cache.device_pool[:, :, 0].nbytes
    driver = Driver(engine)
    assert generate(driver, "p", PROMPT, 16) == rounded.token_ids

    pairs = zip(wanted.token_ids, rounded.token_ids, strict=True)
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert alike >= 7, "choose another prompt: the distance is of equal tokens"

    def distance(made) -> float:
        return max(abs(a - b) for a, b in zip(driver.logprobs["p"][:alike], made.logprobs[:alike], strict=True))

    assert distance(rounded) < distance(wanted) / 4


@pytest.mark.parametrize(
    ("computed", "kept"),
    [
        ("bfloat16", "float32"),
        ("bfloat16", "float16"),
        ("float16", "bfloat16"),
        ("bfloat16", "int8"),
        ("float16", "int8"),
        ("bfloat16", "fp8"),
        ("float16", "fp8"),
    ],
)
def test_other_pairs_of_dtypes(path, computed, kept):
    """What the model computes in and what is stored may be any two: kernels agree with the oracle."""
    engines = {
        name: make_engine(path, dtype=computed, kv_cache_dtype=kept, backend=name) for name in ("cpu", "reference")
    }
    tokens = PROMPT + generate(Driver(engines["reference"]), "p", PROMPT, 12)
    logits = [decoded_logits(engine, tokens).cpu().float() for engine in engines.values()]
    assert_close(logits[0], logits[1], rtol=0, atol=16 * torch.finfo(getattr(torch, computed)).eps)


def decoded_logits(engine, tokens):
    """Of each token after the prompt, decoded alone behind a chunk with all before it: two tokens may be equally likely."""
    driver = Driver(engine)
    for known in range(len(PROMPT), len(tokens)):
        driver.add("p", tokens[:known], known - 1, num_prompt=len(PROMPT))
        driver.run()
        driver.compute("p", 1)
        driver.run()
        driver.remove("p")
    return torch.stack([driver.logits["p"][known] for known in range(len(PROMPT), len(tokens))])


@NEEDS_INVARIANCE
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
def test_invariance_with_a_smaller_cache(path, dtype):
    """The contract holds: every token's keys and values are rounded alike, wherever and whenever they are computed."""
    engine = make_engine(path, kv_cache_dtype=dtype)
    assert engine.invariant
    check_schedules(engine, seeds=QUICK_SEEDS)


@pytest.mark.parametrize("name", ["fp8_e5m2", "float8", "int4", "float64", ""])
def test_unsupported_cache_dtypes(path, name):
    """Refused before anything is loaded, with what there is."""
    words = r"--kv-cache-dtype: .* is not supported; use auto, float32, bfloat16, float16, int8, fp8"
    with pytest.raises(ConfigError, match=words) as caught:
        WorkerSettings.of(model=path, kv_cache_dtype=name)
    assert caught.value.violations[0].field == "kv_cache_dtype"


def test_auto_is_what_the_model_computes_in(path):
    """Without the option the cache has the model's dtype."""
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(path, dtype=dtype)
        assert str(engine.cache.device_pool.dtype) == f"torch.{dtype}"
