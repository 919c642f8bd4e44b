"""What the device keeps of its rows between recorded steps stays right while rows come, leave, grow and are told tokens.

Tokens are those of the modules; each way to bring the device up to date is needed: without it they differ.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos.worker.v1 import worker_pb2
from tests.support.worker.builders import Change, Row, step, tokens_by_row
from tests.worker.fake_cuda.test_recorded import started
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.executor.recorded_decode import RecordedDecode
from worker_svc.rows.table import RowTable

_DRAWN = {"temperature": 1.0, "top_k": 40}


def life() -> Iterator[worker_pb2.SchedulerOutputs]:
    """Blocks hold 8 tokens. Some rows are greedy, some are drawn; steps 5 and 11 are no recorded ones."""
    yield step(1, add=[Row(0, [5, 9, 200, 4, 4, 1], [7], 6), Row(1, [17] * 5, [3], 5, seed=5, **_DRAWN)])
    yield step(2)
    yield step(3)
    yield step(4, change=[Change(0, 1, [11]), Change(1, 1)])
    yield step(5, add=[Row(2, [300, 2, 8], [20], 3, seed=9, **_DRAWN), Row(3, [6, 6], [21], 2)], change=grown(1, 12))
    yield step(6)
    yield step(7, remove=[1])
    yield step(8)
    # Another sequence in row 1, which goes on at the position where the one before it stopped.
    other = [*range(90, 101)]
    yield step(9, remove=[3], add=[Row(1, other, [3, 12], 1, 2, num_computed=10, seed=3, **_DRAWN)])
    yield step(10, change=grown(2, 22))
    yield step(11, change=grown(0, 13), num_decode_steps=2)
    yield step(12)
    yield step(13)


def grown(row: int, *blocks: int) -> list[Change]:
    return [Change(row, 1, blocks)]


def tokens(engine: ModelEngine, *, ahead: int) -> list[dict[int, list[int]]]:
    """`ahead`: steps that are launched before the result of the first of them is read."""
    flying: deque[Any] = deque()
    found = []
    for message in life():
        flying.append(engine.launch(message))
        if len(flying) > ahead:
            found.append(tokens_by_row(flying.popleft().finish()))
    return found + [tokens_by_row(pending.finish()) for pending in flying]


def of(path: Path, *, fuse: bool = True, ahead: int = 1) -> list[dict[int, list[int]]]:
    return tokens(started(path, dtype="float32", block_size=8, fuse=fuse), ahead=ahead)


@pytest.fixture(scope="module")
def expected(shallow: Path) -> list[dict[int, list[int]]]:
    return of(shallow, fuse=False, ahead=0)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 1])
def test_tokens_are_those_of_the_modules(shallow, expected, ahead, monkeypatch):
    """Also while the host knows the tokens of the step before only later."""
    given: list[bool] = []
    run = RecordedDecode.run

    def counted(self: RecordedDecode, batch: Any) -> Any:
        given.append((logits := run(self, batch)) is not None)
        return logits

    monkeypatch.setattr(RecordedDecode, "run", counted)
    assert of(shallow, ahead=ahead) == expected
    assert all(given) and len(given) > 8


# --- each part is needed ---------------------------------------------------------------------------------------------


def nothing(*_: Any) -> None:
    pass


def no_blocks(_: RowTable) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(0, np.int32), np.zeros(0, np.int32)


FAULTS: dict[str, tuple[object, str, object]] = {
    "rows are not forgotten": (RecordedDecode, "_forget", nothing),
    "positions are not sent": (RecordedDecode, "_send_positions", nothing),
    "rows of a step are not sent": (RecordedDecode, "_send_columns", nothing),
    "new blocks are not sent": (RowTable, "new_blocks", no_blocks),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(shallow, expected, fault, monkeypatch):
    """The tokens differ, or the step is refused."""
    monkeypatch.setattr(*FAULTS[fault])
    assert of(shallow) != expected
