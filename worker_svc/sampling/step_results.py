"""Results of a step's rows over all its decode steps, and their wire form. Does not import torch."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from worker_svc.sampling.token_masks import MaskWork

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

USUAL_NS = 100_000
"""Threshold above which a mask's time is reported per row: masks of usual grammars stay below it."""
_NS_PER_US = 1_000


@dataclass(frozen=True, slots=True)
class Tops:
    """Top tokens at the position of each of n tokens, best first.

    Of each row of [n, most], the first `counts[i]` are valid.
    """

    counts: IntArray
    token_ids: IntArray
    logprobs: FloatArray

    @classmethod
    def none(cls, n: int) -> "Tops":
        """No top tokens, for n tokens."""
        return cls(np.zeros(n, np.int32), np.zeros((n, 0), np.int32), np.zeros((n, 0), np.float32))

    def taken(self, at: NDArray[np.int64]) -> "Tops":
        """The entries at indices `at`."""
        return Tops(self.counts[at], self.token_ids[at], self.logprobs[at])

    def flat(self) -> tuple[IntArray, FloatArray]:
        """Valid token ids and logprobs, concatenated."""
        inside = np.arange(self.token_ids.shape[1]) < self.counts[:, None]
        return self.token_ids[inside], self.logprobs[inside]


@dataclass(frozen=True, slots=True)
class Yield:
    """Results of one decode step: n distinct rows, each with `counts` tokens.

    `token_ids`, `logprobs` and `tops`: [sum of counts]. Rows with a flag failed and have no token.
    """

    rows: IntArray
    incarnations: IntArray
    counts: IntArray
    flags: NDArray[np.uint8]
    token_ids: IntArray
    logprobs: FloatArray
    tops: Tops


@dataclass(frozen=True, slots=True)
class Candidates:
    """Continuation candidates of m beams; `tops` [m] are the tokens each may continue with."""

    rows: IntArray
    incarnations: IntArray
    tops: Tops


@dataclass(slots=True)
class MaskTimes:
    """Cost of grammar masks over a message's decode steps; `fill` writes it into the message."""

    _total_ns: int = 0
    _beyond_ns: dict[tuple[int, int], int] = field(default_factory=dict)
    _budget_ms: float = 0.0

    def add(self, rows: IntArray, incarnations: IntArray, work: MaskWork) -> None:
        """Add one decode step. A row delays others by its share of the threads' time."""
        for row, incarnation in zip(rows.tolist(), incarnations.tolist(), strict=True):
            cpu_ns = work.cpu_ns[row]
            self._total_ns += cpu_ns
            if cpu_ns > USUAL_NS:
                beyond_ns = (cpu_ns - USUAL_NS) // work.num_threads
                self._beyond_ns[row, incarnation] = self._beyond_ns.get((row, incarnation), 0) + beyond_ns
        if worker_pb2.ROW_FLAG_MASK_BUDGET in work.flags.values():
            self._budget_ms = work.budget_ms

    def fill(self, result: worker_pb2.WorkerOutputs) -> None:
        """Write the times; none if no mask was computed."""
        result.timings.mask_ns = self._total_ns
        result.mask_budget_ms = self._budget_ms
        if self._beyond_ns:
            places = sorted(self._beyond_ns)
            result.mask_rows = wire_arrays.pack([row for row, _ in places])
            result.mask_incarnations = wire_arrays.pack([incarnation for _, incarnation in places])
            result.mask_us = wire_arrays.pack([self._beyond_ns[place] // _NS_PER_US for place in places])


@dataclass(slots=True)
class StepResults:
    """Collects decode steps; `outputs` builds one message from them."""

    _yields: list[Yield] = field(default_factory=list)
    _candidates: list[Candidates] = field(default_factory=list)
    _prompts: list[worker_pb2.PromptLogprobs] = field(default_factory=list)
    _embeddings: list[worker_pb2.RowEmbedding] = field(default_factory=list)
    _masks: MaskTimes | None = None

    def add(self, found: Yield) -> None:
        """Add tokens and failures of the next decode step."""
        self._yields.append(found)

    def add_candidates(self, found: Candidates) -> None:
        """Add candidates of the next decode step's beams."""
        if len(found.rows):
            self._candidates.append(found)

    def add_prompt(self, row: int, incarnation: int, start: int, logprobs: FloatArray, tops: Tops) -> None:
        """Add prompt logprobs of a row, from token position `start` on; `tops` has an entry per logprob."""
        ids, top_logprobs = tops.flat()
        self._prompts.append(
            worker_pb2.PromptLogprobs(
                row=row,
                incarnation=incarnation,
                start=start,
                logprobs=wire_arrays.pack(logprobs, wire_arrays.F32),
                num_top=int(tops.counts[0]),
                top_token_ids=wire_arrays.pack(ids),
                top_logprobs=wire_arrays.pack(top_logprobs, wire_arrays.F32),
            )
        )

    def add_embedding(self, row: int, incarnation: int, vector: FloatArray) -> None:
        """Add a row's embedding."""
        self._embeddings.append(
            worker_pb2.RowEmbedding(row=row, incarnation=incarnation, values=wire_arrays.pack(vector, wire_arrays.F32))
        )

    def add_masks(self, rows: IntArray, incarnations: IntArray, work: MaskWork) -> None:
        """Add the cost of the grammar masks of `rows` in the next decode step."""
        self._masks = self._masks or MaskTimes()
        self._masks.add(rows, incarnations, work)

    def outputs(
        self, num_computed_tokens: int, timings: worker_pb2.StepTimings, *, logprobs: bool
    ) -> worker_pb2.WorkerOutputs:
        """The step's result, rows ascending. `logprobs`: True if some row requested them for its tokens."""
        result = worker_pb2.WorkerOutputs(
            num_computed_tokens=num_computed_tokens,
            timings=timings,
            prompt_logprobs=self._prompts,
            embeddings=self._embeddings,
        )
        if self._yields:
            found = self._yields[0] if len(self._yields) == 1 else _joined(self._yields)
            _fill_tokens(result, found, logprobs=logprobs)
        if self._candidates:
            _fill_candidates(result, self._candidates)
        if self._masks is not None:
            self._masks.fill(result)
        return result


def _joined(yields: list[Yield]) -> Yield:
    def column(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(found, name) for found in yields])

    names = ("rows", "incarnations", "counts", "flags", "token_ids", "logprobs")
    return Yield(*(column(name) for name in names), _joined_tops([found.tops for found in yields]))  # type: ignore[arg-type]


def _joined_tops(tops: list[Tops]) -> Tops:
    most = max(top.token_ids.shape[1] for top in tops)

    def wide(matrix: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.pad(matrix, ((0, 0), (0, most - matrix.shape[1])))

    return Tops(
        np.concatenate([top.counts for top in tops]),
        np.concatenate([wide(top.token_ids) for top in tops]).astype(np.int32),
        np.concatenate([wide(top.logprobs) for top in tops]).astype(np.float32),
    )


def _fill_tokens(result: worker_pb2.WorkerOutputs, found: Yield, *, logprobs: bool) -> None:
    found = found if _is_ascending(found.rows) else _ascending(found)
    result.rows = wire_arrays.pack(found.rows)
    result.incarnations = wire_arrays.pack(found.incarnations)
    result.num_tokens = wire_arrays.pack(found.counts)
    result.token_ids = wire_arrays.pack(found.token_ids)
    result.flags = wire_arrays.pack(found.flags, wire_arrays.U8)
    if logprobs:
        result.logprobs = wire_arrays.pack(found.logprobs, wire_arrays.F32)
    if found.tops.counts.any():
        result.tops.CopyFrom(worker_pb2.TopColumns(counts=wire_arrays.pack(found.tops.counts), **_packed(found.tops)))


def _is_ascending(rows: IntArray) -> bool:
    """True if each row appears once and in order, as in a single decode step of which no row failed."""
    return len(rows) < 2 or bool(np.logical_and.reduce(rows[1:] > rows[:-1]))


def _ascending(found: Yield) -> Yield:
    """Merge repeated rows: each row once, ascending, its tokens in the order of the decode steps."""
    rows, first, entries = np.unique(found.rows, return_index=True, return_inverse=True)
    owners = np.repeat(entries, found.counts)
    order = np.argsort(owners, kind="stable")
    flags = np.zeros(len(rows), np.uint8)
    np.maximum.at(flags, entries, found.flags)
    return Yield(
        rows=rows,
        incarnations=found.incarnations[first],
        counts=np.bincount(owners, minlength=len(rows)),
        flags=flags,
        token_ids=found.token_ids[order],
        logprobs=found.logprobs[order],
        tops=found.tops.taken(order),
    )


def _fill_candidates(result: worker_pb2.WorkerOutputs, found: list[Candidates]) -> None:
    tops = _joined_tops([candidates.tops for candidates in found])
    result.candidates.CopyFrom(
        worker_pb2.CandidateColumns(
            rows=wire_arrays.pack(np.concatenate([candidates.rows for candidates in found])),
            incarnations=wire_arrays.pack(np.concatenate([candidates.incarnations for candidates in found])),
            counts=wire_arrays.pack(tops.counts),
            **_packed(tops),
        )
    )


def _packed(tops: Tops) -> dict[str, bytes]:
    ids, logprobs = tops.flat()
    return {"token_ids": wire_arrays.pack(ids), "logprobs": wire_arrays.pack(logprobs, wire_arrays.F32)}
