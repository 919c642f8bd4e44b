"""Repeated decode steps by one call of the model's decode program, from last tokens to next ones.

A step that mentions no row repeats the last one. Where all its rows are greedy or sampled without further
rules, the program's own arrays hold the inputs, and the row table takes the tokens. The program chooses those
of greedy rows; the others are drawn from its logits. All other steps, and those of models without such a
program, are the step runner's.
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
from worker_svc.sampling.repeated_draws import FloatArray, RepeatedDraws
from worker_svc.sampling.sampler import TokenDraws
from worker_svc.sampling.step_results import StepResults, Tops, Yield

_NOT_FINITE = worker_pb2.ROW_FLAG_NOT_FINITE


@dataclass(slots=True)
class _Repetition:
    """Rows that repeat, ready for `num_left` steps.

    `draws`: for rows that are not greedy; None if there are none. `columns`: of the results, the same in each
    step.
    """

    rows: IntArray
    inputs: DecodeRows
    run: DecodeRun
    num_left: int
    draws: RepeatedDraws | None
    columns: dict[str, bytes]

    def drawn(self) -> FloatArray | None:
        """Replace the tokens that must be drawn; the logprobs of all, None if no row requested any."""
        if self.draws is None:
            return None
        inputs, run = self.inputs, self.run
        logprobs = self.draws.draw(run.logits, run.finite, inputs.positions, inputs.token_ids)
        return logprobs if self.draws.gives_logprobs else None


class PlainDecode:
    """Call `launch` for each step, before any other code sees it. Owns the inputs of the rows that repeat."""

    def __init__(self, model: RowModel, table: RowTable, draws: TokenDraws) -> None:
        self._model, self._table, self._draws = model, table, draws
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
        try:
            logprobs = repetition.drawn()
        except BaseException:
            self._repetition = None
            self._table.void(self._table.apply(outputs))
            raise
        result = self._advanced(repetition, logprobs) if is_finite else self._failed(repetition, logprobs, outputs)
        timings = result.timings
        timings.prepare_ns, timings.model_ns = prepared_ns - begin_ns, computed_ns - prepared_ns
        timings.sample_ns = clock.monotonic_ns() - computed_ns
        return Finished(result)

    def _begun(self) -> _Repetition | None:
        """The rows that repeat; None if one of them has rules, top logprobs or an adapter, or the model no program."""
        table, options = self._table, self._table.options
        rows = np.flatnonzero(table.repeats).astype(np.int32)
        special = options.rules[rows] | options.num_tops[rows] | options.adapter_ids[rows]
        if not len(rows) or special.any():
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
        draws = RepeatedDraws.of(table, rows, self._draws)
        return _Repetition(rows, inputs, run, table.num_repetitions(rows), draws, columns)

    def _advanced(self, repetition: _Repetition, logprobs: FloatArray | None) -> worker_pb2.WorkerOutputs:
        """Commit a token of every row."""
        rows, token_ids = repetition.rows, repetition.inputs.token_ids
        self._table.repeat(rows, token_ids)
        repetition.num_left -= 1
        return worker_pb2.WorkerOutputs(
            num_computed_tokens=len(rows),
            token_ids=wire_arrays.pack(token_ids),
            logprobs=b"" if logprobs is None else wire_arrays.pack(logprobs, wire_arrays.F32),
            **repetition.columns,
        )

    def _failed(
        self, repetition: _Repetition, logprobs: FloatArray | None, outputs: worker_pb2.SchedulerOutputs
    ) -> worker_pb2.WorkerOutputs:
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
                logprobs=(np.zeros(len(rows), np.float32) if logprobs is None else logprobs)[finite],
                tops=Tops.none(int(finite.sum())),
            )
        )
        return results.outputs(len(rows), worker_pb2.StepTimings(), logprobs=logprobs is not None)
