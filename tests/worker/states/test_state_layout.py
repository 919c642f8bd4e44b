"""Where states are in blocks, and how a pass's tokens are divided into batches of sequences."""

import numpy as np
import pytest
import torch

from svc_common.errors import InvalidArgument
from worker_svc.model.decoder.module_states import StateKey
from worker_svc.model.states.batches import PassStates, SequenceBatch, batches_of
from worker_svc.model.states.layout import HEADER_BYTES, StateShape, default_checkpoint_tokens, layout_of
from worker_svc.rows.states import RowStateBlocks, RowStates, StateEnds


def states(layer: int, *sizes: int) -> tuple[StateShape, ...]:
    return tuple(StateShape(StateKey(layer, "conv", i), (size,), torch.uint8) for i, size in enumerate(sizes))


def test_modules_share_blocks() -> None:
    """Groups of as many modules as a block has layers; each takes the blocks that its largest needs; offsets are aligned."""
    modules = [states(0, 5, 40), states(1, 300), states(2, 64), states(3, 290)]
    layout = layout_of(modules, num_layers=2, index_bytes=100)
    assert [(place.first, place.count, place.index) for place in layout.places] == [
        (4, 1, 0),
        (0, 4, 0),
        (4, 1, 1),
        (0, 4, 1),
    ]
    assert layout.places[0].offsets == (HEADER_BYTES, HEADER_BYTES + 16)
    assert layout.num_blocks == 5
    assert layout_of([], 2, 100).num_blocks == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_bytes_are_shared(seed: int) -> None:
    """Whatever the sizes, no two states overlap, all are within their blocks, and alignments hold."""
    rng = np.random.default_rng(seed)
    modules = [states(i, *rng.integers(1, 500, rng.integers(1, 4)).tolist()) for i in range(int(rng.integers(1, 9)))]
    index_bytes = int(rng.integers(8, 300))
    layout = layout_of(modules, int(rng.integers(1, 5)), index_bytes)
    taken: set[tuple[int, int, int]] = set()
    for number, (module, place) in enumerate(zip(modules, layout.places, strict=True)):
        spans = [(0, 8)] if number == 0 else []
        spans += [(begin, begin + state.num_bytes) for begin, state in zip(place.offsets, module, strict=True)]
        for begin, end in spans:
            assert begin % 16 == 0 and end <= place.count * index_bytes
            of = {(place.index, place.first + at // index_bytes, at % index_bytes) for at in range(begin, end)}
            assert not of & taken
            taken |= of
        assert place.first + place.count <= layout.num_blocks


def test_a_checkpoint_takes_no_more_than_its_tokens() -> None:
    """The default distance: as many blocks of keys and values, in all cache groups, as the states take."""
    assert default_checkpoint_tokens(33, 1, 16) == 33 * 16
    assert default_checkpoint_tokens(33, 2, 16) == 17 * 16
    assert default_checkpoint_tokens(0, 1, 16) == 0


# --- batches ---------------------------------------------------------------------------------------------------------


def work(
    *rows: tuple[int, int],
    reads: dict[int, int] | None = None,
    keeps: tuple[tuple[int, int, int], ...] = (),
    ends: tuple[tuple[int, int], ...] = (),
) -> PassStates:
    """Rows (start, count), with the states of row i in block 10 + i; row: block to read; (row, tokens, block to keep); (row,
    tokens after which it may end)."""
    own = np.arange(10, 10 + len(rows), dtype=np.int32)[:, None]
    before = own.copy()
    for row, block in (reads or {}).items():
        before[row] = block
    kept = np.array(keeps, np.int32).reshape(-1, 3)
    starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    of = RowStates(
        np.arange(len(rows), dtype=np.int32),
        own,
        before,
        starts,
        RowStateBlocks(kept[:, 0], kept[:, 1], kept[:, 2:]),
        StateEnds(*np.array(ends, np.int32).reshape(-1, 2).T),
    )
    return PassStates(of, starts, offsets)


def plain(batch: SequenceBatch) -> tuple[list[list[int]], list[int] | None, list[int]]:
    """Places, blocks read, and blocks written in order of the sequences."""
    sources = None if batch.sources is None else batch.sources[:, 0].tolist()
    return batch.places.tolist(), sources, batch.targets[np.argsort(batch.owners, kind="stable"), 0].tolist()


def made(
    given: PassStates, *, continues: bool = True, most: int = 99
) -> list[tuple[list[list[int]], list[int] | None, list[int]]]:
    return [plain(batch) for batch in batches_of(given, continues=continues, most=most)]


def test_rows_are_cut_where_they_may_end() -> None:
    """After known tokens and each draft token but the last; rows without drafts run beside the first part."""
    found = batches_of(work((7, 3), (9, 1), (4, 4), ends=((0, 8), (0, 9), (2, 6), (2, 7))), continues=True, most=9)
    assert [(batch.places.tolist(), batch.open_ends.tolist()) for batch in found] == [
        ([[0], [3]], [0]),
        ([[4, 5]], [0]),
        ([[1], [6]], [0, 1]),
        ([[2], [7]], []),
    ]
    assert [batch.ends.tolist() for batch in found] == [[8, 10], [6], [9, 7], [10, 8]]


def test_decoding_rows_are_one_batch() -> None:
    """Rows of as many tokens run together; those at their first token, and others, apart."""
    assert made(work((7, 1), (0, 3), (3, 1), (0, 3), (5, 2))) == [
        ([[1, 2, 3], [5, 6, 7]], None, [11, 13]),
        ([[0], [4]], [10, 12], [10, 12]),
        ([[8, 9]], [14], [14]),
    ]
    assert [len(places) for places, *_ in made(work(*[(1, 1)] * 5), most=2)] == [2, 2, 1]


def test_rows_are_cut_where_states_are_kept() -> None:
    """What is behind a checkpoint runs after it, from the row's own blocks; a checkpoint at the end cuts nothing."""
    assert made(work((0, 5), keeps=((0, 2, 90), (0, 5, 91), (0, 2, 92)))) == [
        ([[0, 1]], None, [10, 90, 92]),
        ([[2, 3, 4]], [10], [10, 91]),
    ]


def test_a_row_begins_with_what_another_keeps() -> None:
    """It runs after that, whatever the order of the rows, and over several of them."""
    given = work((2, 1), (0, 4), (4, 2), reads={0: 90, 2: 91}, keeps=((1, 2, 90), (1, 4, 91)))
    assert made(given) == [
        ([[1, 2]], None, [11, 90]),
        ([[0]], [90], [10]),
        ([[3, 4]], [11], [11, 91]),
        ([[5, 6]], [91], [12]),
    ]


def test_rows_that_wait_for_each_other_are_refused() -> None:
    """No order serves them."""
    given = work((2, 2), (2, 2), reads={0: 90, 1: 91}, keeps=((0, 4, 91), (1, 4, 90)))
    with pytest.raises(InvalidArgument, match="rows begin with checkpoints of each other"):
        made(given)


def test_modules_that_take_one_token_at_a_time() -> None:
    """Tokens that continue a state run one by one, side by side with those of other rows; first tokens run at once."""
    assert made(work((3, 2), (0, 3), (5, 1)), continues=False) == [
        ([[2, 3, 4]], None, [11]),
        ([[0], [5]], [10, 12], [10, 12]),
        ([[1]], [10], [10]),
    ]


def test_rows_without_tokens_in_a_pass() -> None:
    """Another pass of the step has them; a row's second part continues its own states, and not what it read."""
    whole = work((4, 4), (0, 2), reads={0: 90}, keeps=((0, 6, 91),))
    first = PassStates(whole.rows, np.array([4, 0], np.int32), np.array([0, 3, 3], np.int32))
    rest = PassStates(whole.rows, np.array([7, 0], np.int32), np.array([0, 1, 3], np.int32))
    assert made(first) == [([[0, 1]], [90], [10, 91]), ([[2]], [10], [10])]
    assert made(rest) == [([[1, 2]], None, [11]), ([[0]], [10], [10])]
