"""Simulated worker: runs plans in order, tracks rows as plans describe them, and checks what its blocks really contain."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from quire_tools.simulation.block_memory import Memory, next_key
from quire_tools.simulation.cost_model import first_computed
from quire_tools.simulation.token_model import TokenModel, mix
from scheduler_svc.core.plan import ScheduledSequence, StepPlan, StepResult
from scheduler_svc.core.request import Group, Request

Complain = Callable[[str], None]


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


class SimulatedWorker:
    """The rows of one worker process. Its output depends only on `tokens`.

    `requests`: by id, with their groups, which show where a step branches. `memory`: None = block contents
    are not simulated. `window`: tokens that attention looks back. `complain` is called for every
    inconsistency: rows that do not fit, blocks with other contents.
    """

    def __init__(
        self,
        tokens: TokenModel,
        requests: Mapping[str, Request],
        memory: Memory | None = None,
        *,
        window: int | None = None,
        block_size: int = 1,
        max_num_rows: int | None = None,
        complain: Complain = lambda _: None,
    ) -> None:
        self.rows: dict[str, _Row] = {}
        self._tokens = tokens
        self._requests = requests
        self._memory = memory
        self._window = window
        self._size = block_size
        self._max_num_rows = max_num_rows
        self._complain = complain
        self._rejected: dict[tuple[int, str], int] = {}
        self._failed: dict[int, None] = {}
        self._told: dict[int, int] = {}

    def told(self, step: int, last_planned: int) -> None:
        """Note that the scheduler knows that step's result; it had planned steps up to `last_planned` without it."""
        if step in self._failed or any(key[0] == step for key in self._rejected):
            self._told[step] = last_planned

    def run(self, plan: StepPlan, *, fails: bool = False) -> StepResult:
        """Run a plan: block moves, then the model, unless that `fails`."""
        self._catch_up(plan.step)
        if self._memory is None:
            return self._draw(plan, fails=fails)
        self._take_orders(plan, self._memory)
        entries = [self._settled(entry) for entry in plan.scheduled]
        for entry in entries:
            self._recall(entry)
        if fails:
            if entries:
                self._failed[plan.step] = None
            return StepResult(plan.step)
        for entry in entries:
            self._write(entry, self._memory)
        result = StepResult(plan.step)
        for entry in entries:
            self._read(entry, self._memory)
            if entry.samples:
                self._sample(entry, result)
        return result

    # --- without blocks -----------------------------------------------------------------------------------------------

    def _draw(self, plan: StepPlan, *, fails: bool) -> StepResult:
        result = StepResult(plan.step)
        if fails:
            return result
        for entry in plan.entries:
            if entry.samples:
                self._sample(self._settled(entry), result)
        if plan.steady is None:
            return result
        rows = zip(plan.steady.rows.tolist(), plan.steady.computed_before.tolist(), strict=True)
        members, token = plan.steady.members, self._tokens.token
        drawn = np.empty(len(plan.steady.rows), np.int64)
        for at, (row, before) in enumerate(rows):
            sequence = members[row].sequences[0]
            offset = before + 1 - sequence.num_prompt_tokens
            drawn[at] = token(sequence.group.request.request_id, sequence.index, offset)
        return replace(result, column=drawn)

    def _catch_up(self, step: int) -> None:
        """Drop corrections of earlier steps that the plan of this step already accounts for."""
        for known in [known for known, last_planned in self._told.items() if last_planned < step]:
            del self._told[known]
            self._failed.pop(known, None)
            for key in [key for key in self._rejected if key[0] == known]:
                del self._rejected[key]

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
        if self._max_num_rows is not None and len(self.rows) > self._max_num_rows:
            self._complain(f"step {plan.step}: {len(self.rows)} rows where there are {self._max_num_rows}")

    def _settled(self, entry: ScheduledSequence) -> ScheduledSequence:
        """Correct `computed_before`: a plan made before results are known counts all draft tokens as accepted."""
        if not self._rejected:
            return entry
        if entry.fresh:
            for key in [key for key in self._rejected if key[1] == entry.name]:
                del self._rejected[key]
        wrong = sum(num for (_, name), num in self._rejected.items() if name == entry.name)
        return replace(entry, computed_before=entry.computed_before - wrong) if wrong else entry

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
        if memory.room(row.table) < end:
            self._complain(f"{entry.name} has {len(row.table)} blocks of {self._size} for {end} tokens")
            return
        sure = end - entry.num_drafts
        key = row.keys[sure - 1] if sure else row.salt
        for position in range(first_computed(entry, self._size), sure):
            memory.write(row.table, position, row.keys[position])
        for position in range(sure, end):
            offset = position - entry.num_prompt_tokens
            key = next_key(key, self._tokens.guess(entry.request_id, entry.index, offset))
            memory.write(row.table, position, key)

    def _read(self, entry: ScheduledSequence, memory: Memory) -> None:
        """Check that the blocks contain everything the share attends to, written before or by other shares of this step."""
        row, start = self.rows[entry.name], first_computed(entry, self._size)
        first = 0 if self._window is None else max(0, start - self._window + 1)
        wrong = memory.first_wrong(row.table, row.keys, first, min(start, len(row.keys)))
        if wrong is None:
            return
        if self._failed:  # an earlier step failed, which the scheduler does not know yet
            memory.forget(row.table, start, entry.computed_before + entry.num_tokens)
        else:
            self._complain(f"{entry.name} reads in the block of its token {wrong} what is not its own")

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _group(self, entry: ScheduledSequence) -> Group | None:
        groups = self._requests[entry.request_id].groups
        if len(groups) == 1:
            return groups[0]
        return next((g for g in groups if any(s.index == entry.index for s in g.sequences)), None)

    def _sample(self, entry: ScheduledSequence, result: StepResult) -> None:
        """Add the output of a share that reached its sequence's last token."""
        request, group, name = self._requests[entry.request_id], self._group(entry), entry.name
        offset = entry.computed_before + entry.num_tokens - entry.num_drafts - entry.num_prompt_tokens
        draw = self._tokens.token
        if group is None:
            return
        if request.beam is not None:
            result.candidates[name] = self._tokens.candidates(entry.request_id, entry.index, offset, group.width)
        elif group.width > len(group.sequences):
            result.children[name] = [draw(entry.request_id, entry.index, offset, k) for k in range(group.width)]
            result.logprobs[name] = [-0.5 - k for k in range(group.width)]
        else:
            tokens = [draw(entry.request_id, entry.index, offset)]
            for at in range(offset, offset + entry.num_drafts):
                if self._tokens.guess(entry.request_id, entry.index, at) != tokens[-1]:
                    break
                tokens.append(draw(entry.request_id, entry.index, at + 1))
            result.tokens[name] = tokens
            if entry.num_drafts:
                self._rejected[result.step, name] = entry.num_drafts + 1 - len(tokens)
