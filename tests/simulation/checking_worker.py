"""A simulated worker with rows and block contents, which complains where a plan does not fit what is there.

Each slot of a block holds a key of all tokens up to it: equal keys mean equal contents, so a block freed too early, a wrong prefix
or a swap to the wrong place is seen when it is read.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire_tools.simulation.cost_model import first_computed
from quire_tools.simulation.token_model import TokenModel, mix
from quire_tools.simulation.virtual_worker import VirtualWorker
from scheduler_svc.core.plan import ScheduledSequence, StepPlan, StepResult
from scheduler_svc.core.request import Request

Complain = Callable[[str], None]
Blocks = dict[int, list[int]]
Pairs = list[tuple[int, int]]


def next_key(before: int, token: int) -> int:
    """The key of a slot, from the key before it and its token."""
    return mix(before, token)


class Memory(Protocol):
    """A worker's view of its blocks."""

    def move(self, swap_in: Pairs, swap_out: Pairs, copy: Pairs) -> None:
        """Swap in, swap out, copy, in this order; the pairs of each kind at once."""

    def room(self, table: list[int]) -> float:
        """Number of tokens that a sequence with that table can have."""

    def write(self, table: list[int], position: int, key: int) -> None:
        """Write the key at a position."""

    def forget(self, table: list[int], start: int, end: int) -> None:
        """Invalidate what was written from `start` to `end`."""

    def first_wrong(self, table: list[int], keys: list[int], start: int, end: int) -> int | None:
        """The first position from `start` to `end` with a slot that does not contain its key; None if all do."""


class BlockMemory:
    """Contents of device and host blocks of `block_size` slots. A slot never written holds 0."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._device: Blocks = {}
        self._host: Blocks = {}

    def move(self, swap_in: Pairs, swap_out: Pairs, copy: Pairs) -> None:
        """See `Memory`."""
        self._move(self._host, self._device, swap_in)
        self._move(self._device, self._host, swap_out)
        self._move(self._device, self._device, copy)

    def room(self, table: list[int]) -> float:
        """See `Memory`."""
        return len(table) * self._size

    def write(self, table: list[int], position: int, key: int) -> None:
        """See `Memory`."""
        block = self._device.get(table[position // self._size])
        if block is None:
            block = self._device[table[position // self._size]] = [0] * self._size
        block[position % self._size] = key

    def forget(self, table: list[int], start: int, end: int) -> None:
        """See `Memory`."""
        for position in range(start, min(end, len(table) * self._size)):
            self.write(table, position, 0)

    def first_wrong(self, table: list[int], keys: list[int], start: int, end: int) -> int | None:
        """See `Memory`."""
        size = self._size
        for at in range(start // size, -(-end // size)):
            low, high = max(start, at * size), min(end, (at + 1) * size)
            held = self._device.get(table[at]) if at < len(table) else None
            wanted = keys[low:high]
            if held is None or held[low - at * size : high - at * size] != wanted:
                return low
        return None

    @staticmethod
    def _move(source: Blocks, target: Blocks, pairs: Pairs) -> None:
        contents = [(destination, list(source.get(block, ()))) for block, destination in pairs]
        for destination, content in contents:
            if content:
                target[destination] = content
            else:
                target.pop(destination, None)


class UncountedMemory:
    """Memory for schedulers that do not account for blocks: never full and never wrong."""

    def move(self, swap_in: Pairs, swap_out: Pairs, copy: Pairs) -> None:
        """No-op."""

    def room(self, table: list[int]) -> float:
        """No limit."""
        return math.inf

    def write(self, table: list[int], position: int, key: int) -> None:
        """No-op."""

    def forget(self, table: list[int], start: int, end: int) -> None:
        """No-op."""

    def first_wrong(self, table: list[int], keys: list[int], start: int, end: int) -> int | None:
        """Always None."""
        return None


@dataclass(slots=True)
class _Row:
    """State of one sequence: block table, tokens received or sampled so far, and the content keys of their prefixes."""

    table: list[int]
    salt: int
    tokens: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    def know(self, tokens: list[int]) -> None:
        """Set the row's tokens; keys of an unchanged prefix stay."""
        same = min(len(self.keys), len(tokens))
        if self.tokens[:same] != tokens[:same]:
            self.keys.clear()
        self.tokens = list(tokens)
        del self.keys[len(tokens) :]

    def reach(self, end: int) -> None:
        """Compute keys for the first `end` tokens."""
        keys, tokens = self.keys, self.tokens
        while len(keys) < end:
            keys.append(next_key(keys[-1] if keys else self.salt, tokens[len(keys)]))


class CheckingWorker(VirtualWorker):
    """The rows and the memory of one worker process.

    `windows`: of each cache group, the tokens that attention looks back; None: all. `complain` is called for every
    inconsistency: rows that do not fit, blocks with other contents.
    """

    def __init__(
        self,
        tokens: TokenModel,
        requests: Mapping[str, Request],
        memory: Memory,
        *,
        windows: Sequence[int | None],
        block_size: int,
        max_num_rows: int,
        complain: Complain,
    ) -> None:
        super().__init__(tokens, requests)
        self.rows: dict[str, _Row] = {}
        self._memory = memory
        self._windows = windows
        self._size = block_size
        self._max_num_rows = max_num_rows
        self._complain = complain
        self._failed: dict[int, None] = {}

    @property
    def num_rows(self) -> int:
        """Number of sequences that it holds."""
        return len(self.rows)

    def run(self, plan: StepPlan, *, fails: bool = False) -> StepResult:
        """Runs a plan: block moves, then the model, unless that `fails`."""
        self._catch_up(plan.step)
        self._take_orders(plan, self._memory)
        entries = [self._settled(entry) for entry in plan.scheduled]
        for entry in entries:
            self._recall(entry)
        result = StepResult(plan.step)
        if fails:
            if entries:
                self._failed[plan.step] = None
            return result
        for entry in entries:
            self._write(entry, self._memory)
        for entry in entries:
            self._read(entry, self._memory)
            if entry.samples:
                self._sample(entry, result)
        return result

    def _forget(self, step: int) -> None:
        super()._forget(step)
        self._failed.pop(step, None)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _take_orders(self, plan: StepPlan, memory: Memory) -> None:
        for name in plan.left:
            self.rows.pop(name, None)
        memory.move(plan.swap_in, plan.swap_out, plan.copy)
        for entry in plan.scheduled:
            row = self.rows.get(entry.name)
            if entry.fresh is not (row is None):
                self._complain(f"step {plan.step}: {entry.name} is {'held already' if row else 'not held'}")
            if row is None or entry.fresh:
                request = self._requests[entry.request_id]
                salt = mix(request.lora_id, len(request.cache_salt))
                row = self.rows[entry.name] = _Row(list(entry.new_block_ids), salt)
                row.know(entry.token_ids or [])
            else:
                row.table += entry.new_block_ids
        if len(self.rows) > self._max_num_rows:
            self._complain(f"step {plan.step}: {len(self.rows)} rows where there are {self._max_num_rows}")

    def _recall(self, entry: ScheduledSequence) -> None:
        """Update the row's tokens; for groups that branch the scheduler chose them and sends them."""
        group, row = self._group(entry), self.rows[entry.name]
        if group is not None and group.width > 1:
            told = next((s.token_ids for s in group.sequences if s.name == entry.name), row.tokens)
            row.know(told)
        sure = entry.computed_before + entry.num_tokens - entry.num_drafts
        while len(row.tokens) < sure:
            row.tokens.append(
                self._tokens.token(entry.request_id, entry.index, len(row.tokens) - entry.num_prompt_tokens)
            )
        row.reach(sure)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _write(self, entry: ScheduledSequence, memory: Memory) -> None:
        row, end = self.rows[entry.name], entry.computed_before + entry.num_tokens
        sure = end - entry.num_drafts
        keys = row.keys[:sure]
        for position in range(sure, end):
            guess = self._tokens.guess(entry.request_id, entry.index, position - entry.num_prompt_tokens)
            keys.append(next_key(keys[-1] if keys else row.salt, guess))
        for table, keys_of_group in self._of_groups(row.table, keys):
            if memory.room(table) < end:
                self._complain(f"{entry.name} has {len(table)} blocks of {self._size} for {end} tokens")
                return
            for position in range(first_computed(entry, self._size), end):
                memory.write(table, position, keys_of_group[position])

    def _of_groups(self, table: list[int], keys: list[int]) -> list[tuple[list[int], list[int]]]:
        """Table and keys of each cache group: a position of a table has one block for each, with contents of its own."""
        step = len(self._windows)
        if step == 1:
            return [(table, keys)]
        return [(table[group::step], [next_key(key, group) for key in keys]) for group in range(step)]

    def _read(self, entry: ScheduledSequence, memory: Memory) -> None:
        """Check that the blocks contain everything the share attends to, written before or by other shares of this step."""
        row, start = self.rows[entry.name], first_computed(entry, self._size)
        groups = self._of_groups(row.table, row.keys)
        for window, (table, keys) in zip(self._windows, groups, strict=True):
            first = 0 if window is None else max(0, start - window + 1)
            wrong = memory.first_wrong(table, keys, first, min(start, len(keys)))
            if wrong is not None and not self._failed:
                self._complain(f"{entry.name} reads in the block of its token {wrong} what is not its own")
            if wrong is not None:
                break
        else:
            return
        for table, _ in groups:  # an earlier step failed, which the scheduler does not know yet
            memory.forget(table, start, entry.computed_before + entry.num_tokens)
