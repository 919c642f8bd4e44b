"""Repeated decode steps of greedy rows by one call of the model's decode program, from last tokens to next ones.

A step that mentions no row repeats the last one. Where all its rows only need their highest logits, the
program's own arrays hold the inputs, and the row table takes the tokens. All other steps, and those of models
without such a program, are the step runner's.
"""

from dataclasses import dataclass

import numpy as np

from paged_kernels.decoder import DecodeRows, DecodeRun
from protos.worker.v1 import worker_pb2
from svc_common import clock, wire_arrays
from worker_svc.engine import Finished
from worker_svc.model.row_model import RowModel
from worker_svc.rows.changes import IntArray, is_repetition
from worker_svc.rows.table import RowTable
from worker_svc.sampling.row_sampler import RowSampler
from worker_svc.sampling.step_results import StepResults, Tops, Yield

_NOT_FINITE = worker_pb2.ROW_FLAG_NOT_FINITE


@dataclass(slots=True)
class _Repetition:
    """Rows that repeat, ready for `num_left` steps. `columns`: of their results, the same in each step."""

    rows: IntArray
    inputs: DecodeRows
    run: DecodeRun
    num_left: int
    columns: dict[str, bytes]


class PlainDecode:
    """Call `launch` for each step, before any other code sees it. Owns the inputs of the rows that repeat."""

    def __init__(self, model: RowModel, table: RowTable, sampler: RowSampler) -> None:
        self._model, self._table, self._sampler = model, table, sampler
        self._repetition: _Repetition | None = None

    def clear(self) -> None:
        """Forget the rows."""
        self._repetition = None

    def launch(self, outputs: worker_pb2.SchedulerOutputs) -> Finished | None:
        """Run a step and commit its tokens; None, with nothing changed, if it is not one for this class."""
        begin_ns = clock.monotonic_ns()
        repetition = (self._repetition or self._begun()) if is_repetition(outputs) else None
        if repetition is None or not repetition.num_left:
            self._repetition = None
            return None
        self._repetition = repetition
        prepared_ns = clock.monotonic_ns()
        is_finite = repetition.run.step()
        computed_ns = clock.monotonic_ns()
        result = self._advanced(repetition) if is_finite else self._failed(repetition, outputs)
        timings = result.timings
        timings.prepare_ns, timings.model_ns = prepared_ns - begin_ns, computed_ns - prepared_ns
        timings.sample_ns = clock.monotonic_ns() - computed_ns
        return Finished(result)

    def _begun(self) -> _Repetition | None:
        """The rows that repeat; None if one of them needs more than its highest logit, or the model has no program."""
        table = self._table
        rows = np.flatnonzero(table.repeats).astype(np.int32)
        if not len(rows) or table.options.adapter_ids[rows].any() or not self._sampler.is_greedy_only(rows):
            return None
        positions = table.num_computed[rows]
        inputs = DecodeRows(table.token_ids[rows, positions], positions, rows, table.block_tables)
        run = self._model.decode(inputs)
        if run is None:
            return None
        columns = {
            "rows": wire_arrays.pack(rows),
            "incarnations": wire_arrays.pack(table.incarnations[rows]),
            "num_tokens": wire_arrays.pack(np.ones_like(rows)),
            "flags": bytes(len(rows)),
        }
        return _Repetition(rows, inputs, run, table.num_repetitions(rows), columns)

    def _advanced(self, repetition: _Repetition) -> worker_pb2.WorkerOutputs:
        """Commit a token of every row."""
        rows, token_ids = repetition.rows, repetition.inputs.token_ids
        self._table.repeat(rows, token_ids)
        repetition.num_left -= 1
        return worker_pb2.WorkerOutputs(
            num_computed_tokens=len(rows), token_ids=wire_arrays.pack(token_ids), **repetition.columns
        )

    def _failed(self, repetition: _Repetition, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        """Commit the tokens of the rows with finite logits; the others fail."""
        rows, finite = repetition.rows, repetition.run.finite
        token_ids, results = repetition.inputs.token_ids, StepResults()
        self._table.commit(self._table.apply(outputs), token_ids, finite)
        self._repetition = None
        results.add(
            Yield(
                rows=rows,
                incarnations=self._table.incarnations[rows],
                counts=finite.astype(np.int32),
                flags=np.where(finite, 0, _NOT_FINITE).astype(np.uint8),
                token_ids=token_ids[finite],
                logprobs=np.zeros(int(finite.sum()), np.float32),
                tops=Tops.none(int(finite.sum())),
            )
        )
        return results.outputs(len(rows), worker_pb2.StepTimings(), logprobs=False)
