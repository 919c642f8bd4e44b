"""The worker of a simulation: answers plans with the tokens of a `TokenModel`. It keeps no rows and no blocks."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire_tools.simulation.token_model import TokenModel
from scheduler_svc.core.fast_decode.share import FastShare
from scheduler_svc.core.plan import ScheduledSequence, StepPlan, StepResult
from scheduler_svc.core.request import Group, Request


class VirtualWorker:
    """One worker process; runs plans in order. Its output depends only on `tokens`.

    `requests`: by id, with their groups, which show where a step branches.
    """

    def __init__(self, tokens: TokenModel, requests: Mapping[str, Request]) -> None:
        self._tokens = tokens
        self._requests = requests
        self._rejected: dict[tuple[int, str], int] = {}
        self._told: dict[int, int] = {}

    @property
    def num_rows(self) -> int:
        """Number of sequences that it holds."""
        return 0

    def told(self, step: int, last_planned: int) -> None:
        """Note that the scheduler knows that step's result; it had planned steps up to `last_planned` without it."""
        self._told[step] = last_planned

    def run(self, plan: StepPlan, *, fails: bool = False) -> StepResult:
        """Run a plan; there is no output if it `fails`."""
        self._catch_up(plan.step)
        result = StepResult(plan.step)
        if fails:
            return result
        for entry in plan.entries:
            if entry.samples:
                self._sample(self._settled(entry), result)
        return result if plan.fast is None else replace(result, column=self._column(plan.fast))

    def _column(self, fast: FastShare) -> NDArray[np.int64]:
        """The tokens of the fast-decode rows."""
        rows = zip(fast.rows.tolist(), fast.computed_before.tolist(), strict=True)
        members, token = fast.members, self._tokens.token
        drawn = np.empty(len(fast.rows), np.int64)
        for at, (row, before) in enumerate(rows):
            sequence = members[row].sequences[0]
            offset = before + 1 - sequence.num_prompt_tokens
            drawn[at] = token(sequence.group.request.request_id, sequence.index, offset)
        return drawn

    def _catch_up(self, step: int) -> None:
        """Drop corrections of earlier steps that the plan of this step already accounts for."""
        for known in [known for known, last_planned in self._told.items() if last_planned < step]:
            del self._told[known]
            self._forget(known)

    def _forget(self, step: int) -> None:
        """Drop the corrections of a step."""
        for key in [key for key in self._rejected if key[0] == step]:
            del self._rejected[key]

    def _settled(self, entry: ScheduledSequence) -> ScheduledSequence:
        """Correct `computed_before`: a plan made before results are known counts all draft tokens as accepted."""
        if not self._rejected:
            return entry
        if entry.fresh:
            for key in [key for key in self._rejected if key[1] == entry.name]:
                del self._rejected[key]
        wrong = sum(num for (_, name), num in self._rejected.items() if name == entry.name)
        return replace(entry, computed_before=entry.computed_before - wrong) if wrong else entry

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
