"""Evaluates the results of a decode step that reached the host: which count and what is reported. Does not change rows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from worker_svc.executor.step_flights import StepInFlight
from worker_svc.rows.options import IntArray
from worker_svc.sampling.draft_verification import Settled, settle
from worker_svc.sampling.row_sampler import NOTHING, Drawn
from worker_svc.sampling.step_results import Candidates, StepResults, Yield

_NOT_FINITE = worker_pb2.ROW_FLAG_NOT_FINITE


@dataclass(frozen=True, slots=True)
class Landed:
    """The outcome of one decode step.

    `token_ids`: of the draws that count. `failed`: rows that fail in addition to those in `settled`.
    """

    drawn: Drawn
    settled: Settled
    token_ids: IntArray
    failed: IntArray


def landed(flight: StepInFlight) -> Landed:
    """The outcome of `flight`; waits for its results."""
    plan = flight.plan
    drawn = flight.drawing.drawn() if flight.drawing is not None else NOTHING
    fit = drawn.finite
    if len(flight.bad_rows):
        fit = fit & ~np.isin(plan.place_rows, flight.bad_rows)
    settled = settle(plan, drawn.token_ids, fit, drawn.opens)
    if drawn.mask_work.flags:
        settled = settled.explained(plan, drawn.mask_work.flags)
    if flight.dropped.any():
        settled = settled.without(plan, ~flight.kept(plan.rows))
    failed: list[int] = flight.bad_vectors.tolist()
    if len(flight.bad_rows):
        failed += np.setdiff1d(flight.bad_rows, plan.rows).tolist()
    return Landed(drawn, settled, drawn.token_ids[settled.kept], np.array(sorted(failed), np.int32))


def report(flight: StepInFlight, landed: Landed, results: StepResults) -> None:
    """Add tokens, failures, candidates and embeddings to the step's results."""
    plan, drawn, settled = flight.plan, landed.drawn, landed.settled
    yields = (settled.counts > 0) | (settled.flags > 0)
    rows = np.concatenate([plan.rows[yields], landed.failed])
    results.add(
        Yield(
            rows=rows,
            incarnations=flight.incarnations_of(rows),
            counts=np.concatenate([settled.counts[yields], np.zeros_like(landed.failed)]),
            flags=np.concatenate([settled.flags[yields], np.full(len(landed.failed), _NOT_FINITE, np.uint8)]),
            token_ids=landed.token_ids,
            logprobs=drawn.logprobs[settled.kept],
            tops=drawn.tops.taken(settled.kept),
        )
    )
    if drawn.mask_work.cpu_ns:
        work = drawn.mask_work
        rows = np.array(sorted(work.cpu_ns), np.int32)
        results.add_masks(rows, flight.incarnations_of(rows), work)
    if len(drawn.beams):
        beams = (settled.flags[drawn.beams] == 0) & flight.kept(plan.rows[drawn.beams])
        rows = plan.rows[drawn.beams[beams]]
        candidates = drawn.candidates.taken(np.flatnonzero(beams))
        results.add_candidates(Candidates(rows, flight.incarnations_of(rows), candidates))
    for row, vector in flight.vectors:
        if row not in landed.failed:
            results.add_embedding(row, int(flight.incarnations_of(np.array([row]))[0]), vector)


def promised_tokens(flight: StepInFlight, landed: Landed) -> tuple[IntArray, NDArray[np.bool_]]:
    """For each row of the flight's promise: the first token it drew, and whether it drew any."""
    assert flight.promise is not None
    settled = landed.settled
    at = np.searchsorted(flight.plan.rows, flight.promise.rows)
    first = (np.cumsum(settled.counts) - settled.counts)[at]
    drew = settled.counts[at] > 0
    token_ids = np.zeros(len(at), np.int32)
    token_ids[drew] = landed.token_ids[first[drew]]
    return token_ids, drew
