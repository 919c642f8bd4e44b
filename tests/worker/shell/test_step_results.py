"""Results of several decode steps become one message: rows ascending, a row's tokens in order, likeliest tokens beside them."""

import numpy as np

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from worker_svc.sampling.step_results import Candidates, StepResults, Tops, Yield

F32, U8 = wire_arrays.F32, wire_arrays.U8


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def tops(counts: list[int], width: int, first: int) -> Tops:
    ids = np.arange(first, first + len(counts) * width, dtype=np.int32).reshape(len(counts), width)
    return Tops(ints(*counts), ids, -ids.astype(np.float32))


def found(rows: list[int], counts: list[int], tokens: list[int], flags: list[int], top: Tops) -> Yield:
    logprobs = -np.array(tokens, np.float32)
    return Yield(ints(*rows), ints(*rows) + 10, ints(*counts), np.array(flags, np.uint8), ints(*tokens), logprobs, top)


def test_rows_are_ascending_and_tokens_stay_with_their_tops() -> None:
    results = StepResults()
    results.add(found([5, 2, 7], [2, 1, 0], [50, 51, 20], [0, 0, 1], tops([1, 0, 2], 2, 100)))
    results.add(found([2, 5], [1, 1], [21, 52], [0, 2], tops([3, 0], 3, 200)))
    message = results.outputs(9, worker_pb2.StepTimings(), logprobs=True)
    assert wire_arrays.unpack(message.rows, "rows").tolist() == [2, 5, 7]
    assert wire_arrays.unpack(message.incarnations, "incarnations").tolist() == [12, 15, 17]
    assert wire_arrays.unpack(message.num_tokens, "num_tokens").tolist() == [2, 3, 0]
    assert wire_arrays.unpack(message.token_ids, "token_ids").tolist() == [20, 21, 50, 51, 52]
    assert wire_arrays.unpack(message.logprobs, "logprobs", F32).tolist() == [-20, -21, -50, -51, -52]
    assert wire_arrays.unpack(message.flags, "flags", U8).tolist() == [0, 2, 1]
    assert wire_arrays.unpack(message.tops.counts, "counts").tolist() == [2, 3, 1, 0, 0]
    assert wire_arrays.unpack(message.tops.token_ids, "ids").tolist() == [104, 105, 200, 201, 202, 100]
    assert wire_arrays.unpack(message.tops.logprobs, "ids", F32).tolist() == [-104, -105, -200, -201, -202, -100]


def test_what_was_not_requested_is_not_sent() -> None:
    results = StepResults()
    results.add(found([1], [1], [5], [0], Tops.none(1)))
    results.add_candidates(Candidates(ints(), ints(), Tops.none(0)))
    message = results.outputs(1, worker_pb2.StepTimings(), logprobs=False)
    assert not message.logprobs
    assert not message.HasField("tops")
    assert not message.HasField("candidates")
    empty = StepResults().outputs(0, worker_pb2.StepTimings(), logprobs=True)
    assert not empty.rows


def test_candidates_of_several_beams() -> None:
    results = StepResults()
    results.add_candidates(Candidates(ints(4, 6), ints(1, 2), tops([1, 2], 2, 10)))
    message = results.outputs(0, worker_pb2.StepTimings(), logprobs=False).candidates
    assert wire_arrays.unpack(message.rows, "rows").tolist() == [4, 6]
    assert wire_arrays.unpack(message.incarnations, "incarnations").tolist() == [1, 2]
    assert wire_arrays.unpack(message.counts, "counts").tolist() == [1, 2]
    assert wire_arrays.unpack(message.token_ids, "ids").tolist() == [10, 12, 13]
