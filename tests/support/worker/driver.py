"""Drives a ModelEngine as a scheduler would, with hand-made steps: rows, blocks and chunks are what a test says."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paged_kernels.decoder import DecodeRows, DecodeRun
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from tests.support.cuda import DEVICE_SETTINGS, DEVICES
from worker_svc.executor.forward import Computed, Forward
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.model.row_model import RowModel
from worker_svc.rows.batch import StepBatch
from worker_svc.settings import WorkerSettings

BLOCK_SIZE = 16
_MOST_GROUPS = 32
NUM_STATES, NUM_CPU_STATES = 40, 12
"""Sequences and checkpoints for which an engine has blocks of states."""


def on_tests_device(settings: dict[str, Any]) -> dict[str, Any]:
    """The same, on the tests' device unless they say where."""
    return settings if {"device", "backend"} & settings.keys() else settings | DEVICE_SETTINGS


def new_engine(path: Path, *, num_blocks: int = 160, **settings: Any) -> ModelEngine:
    """An engine before it is loaded."""
    sizes = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": num_blocks, "swap_space_gib": 0.05}
    return ModelEngine(WorkerSettings.of(model=path, **sizes, **on_tests_device(settings)), DEVICES)


def limits_of(path: Path, **settings: Any) -> common_pb2.ModelLimits:
    """What a worker says about the model: with blocks of 16 tokens, how many the states of a sequence take, for example."""
    return new_engine(path, **settings).load(lambda _stage, _fraction: None)


def make_engine(path: Path, *, num_blocks: int = 160, num_cpu_blocks: int = 40, **settings: Any) -> ModelEngine:
    """A loaded, profiled and allocated engine, with so many blocks for each cache group."""
    engine = new_engine(path, num_blocks=num_blocks * _MOST_GROUPS, **settings)
    limits = engine.load(lambda _stage, _fraction: None)
    num_groups, of_states = len(limits.cache_windows) or 1, limits.num_state_blocks
    engine.profile(64, 8)
    engine.allocate(
        num_blocks * num_groups + NUM_STATES * of_states, num_cpu_blocks * num_groups + NUM_CPU_STATES * of_states
    )
    return engine


def ids_of(engine: ModelEngine, blocks: Iterable[int]) -> list[int]:
    """Block ids of these places in block tables: each has one for each cache group of the engine."""
    num_groups = 1 if engine._loaded is None else engine._loaded.num_groups
    return [block * num_groups + group for block in blocks for group in range(num_groups)]


def state_ids_of(engine: ModelEngine, states: Iterable[int], *, on_host: bool = False) -> list[int]:
    """Block ids of the states with these numbers: the last ones of the pool."""
    count = 0 if engine._loaded is None else engine._loaded.num_state_blocks
    first = 0
    if count:
        pool, most = (engine.cache.host_pool, NUM_CPU_STATES) if on_host else (engine.cache.device_pool, NUM_STATES)
        first = pool.shape[2] - most * count
    return [first + state * count + i for state in states for i in range(count)]


@dataclass
class Row:
    """What the driver knows of a row. `state`: number of its states."""

    index: int
    incarnation: int
    token_ids: list[int]
    num_prompt: int
    blocks: list[int]
    computed: int
    options: dict[str, Any]
    state: int = 0


@dataclass
class Step:
    """One step in the making. `drafts`: by row index, of `changed`."""

    added: list[tuple[Row, int]] = field(default_factory=list)
    changed: list[tuple[Row, int, list[int]]] = field(default_factory=list)
    drafts: dict[int, int] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_swap_in: list[tuple[int, int]] = field(default_factory=list)
    state_swap_out: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    reads: list[tuple[Row, int, int]] = field(default_factory=list)
    keeps: list[tuple[Row, int, int]] = field(default_factory=list)


class Driver:
    """Keeps rows like a scheduler; `logits[name][position]` holds every row's sampled logits, bit for bit.

    Its blocks are places in block tables; `ids_of` has the ids that the engine is sent for them.
    """

    def __init__(
        self,
        engine: ModelEngine,
        take_block: Callable[[], int] | None = None,
        take_state: Callable[[], int] | None = None,
    ) -> None:
        self.engine = engine
        self.rows: dict[str, Row] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.flags: dict[str, int] = {}
        self.logits: dict[str, dict[int, torch.Tensor]] = {}
        self.num_computed = 0
        self.num_plain_steps = 0
        self._next_block = 0
        self._take = take_block or self._count
        self._take_state = take_state or self._count_states
        self._next_state = -1
        self._lives: dict[int, int] = {}
        self._step_id = 0
        self.step = Step()
        engine.reset()

    def _count(self) -> int:
        self._next_block += 1
        return self._next_block

    def _count_states(self) -> int:
        self._next_state += 1
        return self._next_state % NUM_STATES

    # --- building a step ---------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        token_ids: Sequence[int],
        num_tokens: int | None = None,
        *,
        num_prompt: int | None = None,
        blocks: Sequence[int] = (),
        computed: int = 0,
        room: int = 0,
        state: int | None = None,
        reads: int | None = None,
        **options: Any,
    ) -> Row:
        """A row joins: `computed` tokens of it lie in `blocks`; `num_tokens` (None = all that are left) are computed now.

        `room`: tokens that its blocks can take beyond those known, so that steps need not mention it. `state`: where its states
        are; None = new ones. `reads`: states that it begins with instead.
        """
        index = next(i for i in range(1000) if i not in {row.index for row in self.rows.values()})
        life = self._lives.get(index, -1) + 1
        self._lives[index] = life
        row = Row(index, life, list(token_ids), num_prompt or len(token_ids), list(blocks), computed, options)
        row.state = self._take_state() if state is None else state
        if reads is not None:
            self.step.reads.append((row, computed, reads))
        self.rows[name] = row
        self._grow(row, len(token_ids) + room)
        self.step.added.append((row, len(token_ids) - computed if num_tokens is None else num_tokens))
        self.tokens.setdefault(name, [])
        self.logprobs.setdefault(name, [])
        return row

    def compute(self, name: str, num_tokens: int | None = None, *, room: int = 0, drafts: int = 0) -> None:
        """A row's share of this step: the next `num_tokens` (None = all known ones), then `drafts`; `room`: see `add`."""
        row = self.rows[name]
        new = self._grow(row, len(row.token_ids) + room + drafts)
        count = len(row.token_ids) - row.computed if num_tokens is None else num_tokens
        self.step.changed.append((row, count + drafts, new))
        self.step.drafts[row.index] = drafts

    def pause(self, name: str) -> None:
        """The row computes nothing in this step."""
        self.step.changed.append((self.rows[name], 0, []))

    def keep(self, name: str, num_tokens: int, state: int) -> None:
        """The row's states after so many tokens of this step are kept."""
        self.step.keeps.append((self.rows[name], num_tokens, state))

    def remove(self, name: str) -> Row:
        """The row leaves before the step runs."""
        row = self.rows.pop(name)
        self.step.removed.append(row.index)
        return row

    def _grow(self, row: Row, num_tokens: int) -> list[int]:
        new = [self._take() for _ in range(-(-num_tokens // BLOCK_SIZE) - len(row.blocks))]
        row.blocks += new
        return new

    # --- running it --------------------------------------------------------------------------------------------------

    def run(self, num_decode_steps: int = 1) -> worker_pb2.WorkerOutputs:
        """Runs the step; the rows' counts follow by the rule of worker.proto."""
        self._step_id += 1
        share = {row.index: n for row, n in self.step.added} | {
            row.index: n - self.step.drafts.get(row.index, 0) for row, n, _ in self.step.changed
        }
        message = self._message(num_decode_steps)
        seen: list[torch.Tensor] = []
        runner = self.engine._runner
        inner, runner._forward = runner._forward, Watched(runner._forward, seen)
        if runner._plain is not None and not isinstance(runner._plain._model, WatchedModel):
            runner._plain._model = WatchedModel(runner._plain._model)
        try:
            outputs = self.engine.execute(message)
        finally:
            runner._forward = inner
        if not seen:
            self.num_plain_steps += 1
            seen.append(runner._plain._model.run.logits)
        self.num_computed += outputs.num_computed_tokens
        self._take_in(outputs, share, seen)
        self.step = Step()
        return outputs

    def _message(self, num_decode_steps: int) -> worker_pb2.SchedulerOutputs:
        pack, step = wire_arrays.pack, self.step
        message = worker_pb2.SchedulerOutputs(
            step_id=self._step_id,
            num_decode_steps=num_decode_steps,
            removed_rows=pack(step.removed),
            blocks_to_swap_in=self._pairs(step.swap_in) + self._state_pairs(step.state_swap_in, (True, False)),
            blocks_to_swap_out=self._pairs(step.swap_out) + self._state_pairs(step.state_swap_out, (False, True)),
            blocks_to_copy=self._pairs(step.copies) + self._state_pairs(step.state_copies, (False, False)),
            states_to_read=self._states(step.reads),
            states_to_keep=self._states(step.keeps),
        )
        if step.added:
            message.added.CopyFrom(added_rows(step.added, self.ids, self.state_ids))
        if step.changed:
            message.changed.CopyFrom(
                worker_pb2.ChangedRows(
                    rows=pack([row.index for row, _, _ in step.changed]),
                    incarnations=pack([row.incarnation for row, _, _ in step.changed]),
                    num_tokens=pack([n for _, n, _ in step.changed]),
                    num_new_blocks=pack([len(self.ids(new)) for _, _, new in step.changed]),
                    new_block_ids=pack([block for _, _, new in step.changed for block in self.ids(new)]),
                    # Empty without drafts, as a scheduler sends it: a step with this column waits for all steps before it.
                    num_draft_tokens=pack([step.drafts.get(row.index, 0) for row, _, _ in step.changed])
                    if any(step.drafts.values())
                    else b"",
                )
            )
        return message

    def ids(self, blocks: Sequence[int]) -> list[int]:
        """See `ids_of`."""
        return ids_of(getattr(self.engine, "own", self.engine), blocks)

    def state_ids(self, states: Sequence[int], *, on_host: bool = False) -> list[int]:
        """See `state_ids_of`."""
        return state_ids_of(getattr(self.engine, "own", self.engine), states, on_host=on_host)

    def _states(self, places: Sequence[tuple[Row, int, int]]) -> worker_pb2.StateBlocks | None:
        if not places:
            return None
        rows, counts, states = zip(*places, strict=True)
        return worker_pb2.StateBlocks(
            rows=wire_arrays.pack([row.index for row in rows]),
            num_tokens=wire_arrays.pack(counts),
            block_ids=wire_arrays.pack(self.state_ids(states)),
        )

    def _state_pairs(self, pairs: Sequence[tuple[int, int]], on_host: tuple[bool, bool]) -> bytes:
        sides = [self.state_ids([pair[side] for pair in pairs], on_host=on_host[side]) for side in (0, 1)]
        return wire_arrays.pack_pairs(list(zip(*sides, strict=True)))

    def _pairs(self, pairs: Sequence[tuple[int, int]]) -> bytes:
        sources, targets = (self.ids([pair[side] for pair in pairs]) for side in (0, 1))
        return wire_arrays.pack_pairs(list(zip(sources, targets, strict=True)))

    def _take_in(self, outputs: worker_pb2.WorkerOutputs, share: dict[int, int], logits: list[torch.Tensor]) -> None:
        names = {row.index: name for name, row in self.rows.items()}
        for index, name in names.items():
            row = self.rows[name]
            repeats = row.computed == len(row.token_ids) - 1 and row.computed > 0
            row.computed += share.get(index, 1 if repeats else 0)
        rows = wire_arrays.unpack(outputs.rows, "rows").tolist()
        counts = wire_arrays.unpack(outputs.num_tokens, "num_tokens").tolist()
        flags = wire_arrays.unpack(outputs.flags, "flags", wire_arrays.U8).tolist()
        tokens = iter(wire_arrays.unpack(outputs.token_ids, "token_ids").tolist())
        logprobs = iter(wire_arrays.unpack(outputs.logprobs, "logprobs", wire_arrays.F32).tolist())
        reached = [count + (flag != 0) for count, flag in zip(counts, flags, strict=True)]
        # More tokens than decode steps (guesses, children): which logits are whose is not told.
        plain = max(reached, default=0) <= len(logits)
        for place, (index, count, flag) in enumerate(zip(rows, counts, flags, strict=True)):
            name = names[index]
            row = self.rows[name]
            self.flags[name] = flag
            # A row draws in each decode step until it fails; the places of those behind it close up.
            for i in range(reached[place] if plain else 0):
                at = sum(steps > i for steps in reached[:place])
                self.logits.setdefault(name, {})[len(row.token_ids) + i] = logits[i][at].clone()
            new = [next(tokens) for _ in range(count)]
            row.computed += max(0, count - 1)
            row.token_ids += new
            self.tokens[name] += new
            self.logprobs[name] += [next(logprobs, 0.0) for _ in range(count)]


class Watched:
    """A `Forward` that keeps the logits of each decode step."""

    def __init__(self, inner: Forward, seen: list[torch.Tensor]) -> None:
        self._inner, self._seen = inner, seen

    def compute(self, batch: StepBatch, timings: worker_pb2.StepTimings) -> Computed:
        """See Forward."""
        computed = self._inner.compute(batch, timings)
        self._seen.append(computed.logits)
        return computed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedModel:
    """A model, as `PlainDecode` sees it, that keeps the last run."""

    def __init__(self, inner: RowModel) -> None:
        self._inner = inner
        self.run: DecodeRun | None = None

    def decode(self, rows: DecodeRows) -> DecodeRun | None:
        """See RowModel."""
        self.run = self._inner.decode(rows)
        return self.run


def added_rows(
    entries: Sequence[tuple[Row, int]],
    ids: Callable[[Sequence[int]], Sequence[int]] = list,
    state_ids: Callable[[Sequence[int]], Sequence[int]] = lambda _states: [],
) -> worker_pb2.AddedRows:
    """The wire form of rows that join; `ids`: of places in block tables, `state_ids`: of states."""
    pack, rows = wire_arrays.pack, [row for row, _ in entries]

    def option(name: str, default: float, dtype: Any = wire_arrays.I32) -> bytes:
        return pack([row.options.get(name, default) for row in rows], dtype)

    return worker_pb2.AddedRows(
        rows=pack([row.index for row in rows]),
        incarnations=pack([row.incarnation for row in rows]),
        num_known_tokens=pack([len(row.token_ids) for row in rows]),
        token_ids=pack([token for row in rows for token in row.token_ids]),
        num_prompt_tokens=pack([row.num_prompt for row in rows]),
        num_computed_tokens=pack([row.computed for row in rows]),
        num_tokens=pack([n for _, n in entries]),
        num_blocks=pack([len(state_ids([row.state])) + len(ids(row.blocks)) for row in rows]),
        block_ids=pack([block for row in rows for block in (*state_ids([row.state]), *ids(row.blocks))]),
        temperatures=option("temperature", 0.0, wire_arrays.F32),
        top_ps=option("top_p", 1.0, wire_arrays.F32),
        top_ks=option("top_k", 0),
        seeds=option("seed", 0, wire_arrays.U64),
        sequence_indexes=option("sequence_index", 0),
        logprobs=option("logprobs", 1, wire_arrays.U8),
        names=[f"r{row.index}/0" for row in rows],
        options=[
            worker_pb2.RowOptions(at=i, **row.options["rare"]) for i, row in enumerate(rows) if "rare" in row.options
        ],
    )


def generate(driver: Driver, name: str, prompt: Sequence[int], num_tokens: int, **options: Any) -> list[int]:
    """Prefill at once, then decode alone."""
    driver.add(name, prompt, **options)
    driver.run()
    for _ in range(num_tokens - 1):
        driver.compute(name)
        driver.run()
    driver.remove(name)
    return driver.tokens[name]
