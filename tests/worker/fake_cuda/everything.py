"""Steps of every kind, as messages that depend on no result: run on several engines, their results can be compared."""

from collections.abc import Iterator

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from tests.support.worker.builders import Change, Row, rare, step
from tests.support.worker.sampled_rows import Options
from worker_svc.engine import Pending
from worker_svc.executor.model_engine import ModelEngine

NUM_BLOCKS, NUM_HOST_BLOCKS = 40, 6
PROMPT = [7, 30, 2] * 4
ADAPTER_ID = 3
CHUNK = 5
_ROOM = 2
_SPARE = NUM_BLOCKS - 4
"""First of the blocks that no row has."""


def _row(at: int, num_tokens: int = len(PROMPT), **fields: object) -> Row:
    blocks = range(_ROOM * at, _ROOM * at + _ROOM)
    return Row(at, PROMPT, blocks, num_tokens, **{"logprobs": True, **fields})  # type: ignore[arg-type]


def _with(at: int, options: Options) -> Row:
    return _row(
        at, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, options=options.message()
    )


def rows() -> list[Row]:
    """One of each kind. In two chunks: the first and the mean."""
    scored = common_pb2.ResolvedSampling(num_prompt_logprobs=2)
    grammar = common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, text="[a-f]{4,20}")
    return [
        _row(0, CHUNK),
        _with(1, Options(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, num_tops=3)),
        _with(2, Options(temperature=0.0, repetition=1.4, presence=0.3, frequency=0.7, bias={5: 2.0, 9: -50.0})),
        _with(3, Options(allowed=list(range(20, 90)), bad_words=[[30, 31], [40]], min_tokens=3, ends=[25])),
        _row(4, options=rare(common_pb2.ResolvedSampling(grammar=grammar)), temperature=0.8),
        _row(5, options=rare(num_candidates=4)),
        _row(6, options=rare(num_children=3), temperature=1.0),
        _row(7, CHUNK, options=rare(task=common_pb2.TASK_EMBED_MEAN)),
        _row(8, options=rare(task=common_pb2.TASK_EMBED_LAST)),
        _row(9, options=rare(scored)),
        _row(10, options=rare(adapter_id=ADAPTER_ID)),
        _row(11, options=rare(scored, adapter_id=ADAPTER_ID)),
        _row(12),
    ]


def messages(*, with_adapters: bool = True) -> Iterator[worker_pb2.SchedulerOutputs]:
    """Prefill and chunks; drafts, a beam that is told its token; moves of blocks; decode steps of one and of several tokens."""
    left = len(PROMPT) - CHUNK
    here = [row for row in rows() if with_adapters or row.options is None or not row.options.adapter_id]
    yield step(1, add=here)
    yield step(2, change=[Change(0, left), Change(5, 1, told=[11]), Change(7, left), Change(12, 3, num_drafts=2)])
    yield step(3, remove=[1, 5, 6, 7, 8, 9], swap_out=[(0, 1), (2, 0)], copy=[(0, _SPARE), (1, _SPARE + 1)])
    yield step(4, swap_in=[(1, _SPARE + 2), (0, _SPARE + 3)], change=[Change(12, 2, num_drafts=1)])
    yield step(5, remove=[2, 3, 4, *([11] if with_adapters else [])], num_decode_steps=2)
    yield step(6)


Numbers = NDArray[np.float32]
_MEASURED = ("timings", "mask_rows", "mask_incarnations", "mask_us")


def apart(result: worker_pb2.WorkerOutputs) -> tuple[worker_pb2.WorkerOutputs, Numbers]:
    """A result without its floating-point columns, and those: their last bits depend on where memory lies. Without its times."""
    copy, found = worker_pb2.WorkerOutputs(), []
    copy.CopyFrom(result)
    for name in _MEASURED:
        copy.ClearField(name)
    # Rows with adapters come first where the others are computed by a program.
    copy.prompt_logprobs.sort(key=lambda scores: scores.row)
    _take_numbers(copy, found)
    return copy, np.concatenate([np.zeros(0, np.float32), *found])


def _take_numbers(message: Message, found: list[Numbers]) -> None:
    for field, value in message.ListFields():
        if isinstance(value, bytes) and (field.name.endswith("logprobs") or field.name == "values"):
            found.append(wire_arrays.unpack(value, field.name, wire_arrays.F32))
            message.ClearField(field.name)
        elif not isinstance(value, (bytes, int)):
            for part in [value] if isinstance(value, Message) else value:
                _take_numbers(part, found)


def check_same(
    found: list[worker_pb2.WorkerOutputs], expected: list[worker_pb2.WorkerOutputs], tolerance: float
) -> None:
    """Equal but for `tolerance` of floating-point numbers."""
    assert [apart(result)[0] for result in found] == [apart(result)[0] for result in expected]
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(apart(mine)[1], apart(other)[1], atol=tolerance)


def done(engine: ModelEngine, *, with_adapters: bool = True) -> list[worker_pb2.WorkerOutputs]:
    """Results, each step launched before the one before it was read."""
    results, pending = [], None
    for message in messages(with_adapters=with_adapters):
        launched = engine.launch(message)
        if pending is not None:
            results.append(_finished(pending))
        pending = launched
    return [*results, _finished(pending)]


def _finished(pending: Pending | None) -> worker_pb2.WorkerOutputs:
    assert pending is not None
    return pending.finish()
