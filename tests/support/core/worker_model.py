"""A worker for core tests: its tokens are a function of a sequence's past, its memory holds which prefix lies in every slot.

It knows of a plan what the wire would tell it. Whatever the scheduler decides, a sequence must read its own past.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from block_manager.cache_rules import StateMoves
from scheduler_svc.core.plan import ScheduledSequence, StepPlan, StepResult
from scheduler_svc.core.request import Request

EOS = 0
_PRIME = 1_000_003
_MASK = (1 << 61) - 1
_STATE = -1
"""The slot of a block that holds states."""


def mix(*parts: int) -> int:
    """A number that looks random and depends on all parts alone, the same in every process."""
    value = 88172645463325252
    for part in parts:
        value = (value ^ part) * _PRIME & _MASK
        value ^= value >> 23
    return value


def token_at(seed: int, index: int, position: int, choice: int = 0) -> int:
    """The model: the token at `position` of the sequence with that index; each 24th is EOS. `choice`: of several children."""
    value = mix(seed, index, position, choice)
    return EOS if value % 24 == 0 else 1 + value % 97


def guess_at(seed: int, index: int, position: int) -> int:
    """A draft: right two times of three."""
    return token_at(seed, index, position) if mix(seed, index, position, 7) % 3 else 99


def candidates_at(seed: int, index: int, position: int, width: int) -> list[tuple[int, float]]:
    """2 * `width` different next tokens of a beam with logprobs, best first."""
    first = mix(seed, index, position, 11)
    return [((first + 7 * k) % 61, -0.1 * (1 + k) - first % 5 / 7) for k in range(2 * width)]


class PrefixKeys:
    """Keys of the prefixes of one token stream: equal keys = equal KV."""

    def __init__(self, salt: int) -> None:
        self.tokens: list[int] = []
        self.keys: list[int] = []
        self._salt = salt

    def after(self, position: int, token: int) -> int:
        """The key of the prefix up to `position` if `token` stands there."""
        return mix(self.keys[position - 1] if position else self._salt, token)

    def set_tokens(self, start: int, tokens: list[int]) -> None:
        """What stands from `start` on."""
        del self.tokens[start:], self.keys[start:]
        for token in tokens:
            self.keys.append(self.after(len(self.tokens), token))
            self.tokens.append(token)


class WorkerModel:
    """Owner of the memory and of what the worker holds of each sequence. `past(name)`: prompt and all tokens told so far.

    `windows`: of each cache group, the tokens that its layers look back; None: all. KV of the groups is different.
    `num_state_blocks`: the first blocks of a sequence, in which its states are.
    """

    def __init__(
        self,
        block_size: int,
        windows: Sequence[int | None],
        past: Callable[[str], list[int]],
        *,
        has_blocks: bool,
        num_state_blocks: int = 0,
    ) -> None:
        self.held: dict[str, list[int]] = {}
        self.images: dict[str, list[dict[int, int]]] = {}
        self._size = block_size
        self._windows = windows
        self._past = past
        self._has_blocks = has_blocks
        self._num_states = num_state_blocks
        self._device: dict[int, dict[int, int]] = {}
        self._host: dict[int, dict[int, int]] = {}
        self._streams: dict[str, PrefixKeys] = {}
        self._rejected: dict[tuple[int, str], int] = {}
        self._failed: set[int] = set()

    def lose_everything(self) -> None:
        """A new process takes its place."""
        for memory in (self.held, self.images, self._device, self._host, self._streams, self._rejected):
            memory.clear()

    def copied(self, blocks: tuple[int, ...]) -> list[dict[int, int]]:
        """What is in these blocks now; nothing where there is none."""
        return [dict(self._device.get(block, {})) for block in blocks]

    def told(self, step: int) -> None:
        """The scheduler knows that step's result now."""
        self._failed.discard(step)
        for key in [key for key in self._rejected if key[0] == step]:
            del self._rejected[key]

    def run(self, plan: StepPlan, requests: dict[str, Request], seeds: dict[str, int], *, fails: bool) -> StepResult:
        """Executes a plan: moves, then the model, unless that `fails`."""
        self._take_orders(plan)
        result = StepResult(plan.step)
        entries = [self._settled(entry) for entry in plan.scheduled]
        begun = self._begin(plan, entries, requests) if self._num_states else {}
        for entry in entries:
            self._recall(entry, requests[entry.request_id])
            if not fails:
                self._compute(entry, seeds[entry.request_id])
        if fails and entries:
            self._failed.add(plan.step)
        else:
            for entry in entries:
                self._check_reads(entry)
                if entry.samples:
                    _sample(entry, requests[entry.request_id], seeds[entry.request_id], result)
                    self._reject(entry, result)
        if begun and not fails:
            self._end(plan, entries, begun, result)
        return result

    def _settled(self, entry: ScheduledSequence) -> ScheduledSequence:
        """A plan made before results are known counts all their guesses as right; the worker knows better (R151)."""
        if entry.fresh:
            for key in [key for key in self._rejected if key[1] == entry.name]:
                del self._rejected[key]
        wrong = sum(num for (_, name), num in self._rejected.items() if name == entry.name)
        return replace(entry, computed_before=entry.computed_before - wrong) if wrong else entry

    def _reject(self, entry: ScheduledSequence, result: StepResult) -> None:
        if entry.num_drafts and entry.name in result.tokens:
            self._rejected[result.step, entry.name] = entry.num_drafts + 1 - len(result.tokens[entry.name])

    # --- inside -------------------------------------------------------------------------------------------------------

    def _take_orders(self, plan: StepPlan) -> None:
        for name in plan.left:
            self.held.pop(name, None)
        for image, pairs in plan.placed.items():
            contents = self.images.pop(image)
            self._device.update({block: dict(contents[i]) for i, block in pairs})
        _move(self._host, self._device, plan.swap_in)
        _move(self._device, self._host, plan.swap_out)
        _move(self._device, self._device, plan.copy)
        for entry in plan.scheduled:
            assert entry.fresh is (entry.name not in self.held), f"{entry.name}: the worker holds {sorted(self.held)}"
            if entry.fresh:
                self.held[entry.name] = list(entry.new_block_ids)
            else:
                self.held[entry.name] += entry.new_block_ids

    def _recall(self, entry: ScheduledSequence, request: Request) -> None:
        """Brings its stream up to date."""
        salt = mix(request.lora_id, len(request.cache_salt))
        stream, past = self._streams.setdefault(entry.name, PrefixKeys(salt)), self._past(entry.name)
        assert entry.token_ids is None or entry.token_ids == past, f"{entry.name} goes to the worker with other tokens"
        if stream.tokens[: len(past)] != past:
            stream.set_tokens(0, past)

    def _check_reads(self, entry: ScheduledSequence) -> None:
        """All that it looks at and does not compute must be in its blocks, from before or by others in this step (R136)."""
        if not self._has_blocks:
            return
        stream = self._streams[entry.name]
        start = max(entry.computed_before, entry.num_cached_blocks * self._size)
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, min(start, len(stream.keys))):
                block, slot = self._place(entry.name, position, group)
                is_own = self._device.get(block, {}).get(slot) == _of_group(stream.keys[position], group)
                if not is_own and self._failed:
                    self._spoil(entry)  # the scheduler does not know yet that a step before it failed
                    return
                assert is_own, f"{entry.name} reads what is not its token {position}, in cache group {group}"

    def _spoil(self, entry: ScheduledSequence) -> None:
        """What it computed is worth nothing."""
        if self._has_blocks:
            start = max(entry.computed_before, entry.num_cached_blocks * self._size)
            for position in range(start, entry.computed_before + entry.num_tokens):
                for group in range(len(self._windows)):
                    block, slot = self._place(entry.name, position, group)
                    self._device.get(block, {}).pop(slot, None)

    def _place(self, name: str, position: int, group: int) -> tuple[int, int]:
        """Block and slot of a token in a cache group: at each position of a table there is one block for each group."""
        at = position // self._size * len(self._windows) + group
        return self.held[name][self._num_states + at], position % self._size

    def _compute(self, entry: ScheduledSequence, seed: int) -> None:
        stream = self._streams[entry.name]
        start = max(entry.computed_before, entry.num_cached_blocks * self._size)
        end = entry.computed_before + entry.num_tokens
        sure = end - entry.num_drafts
        for position in range(len(stream.tokens), sure):
            stream.set_tokens(position, [token_at(seed, entry.index, position)])
        guess = None
        for position in range(start, end):
            if position < sure:
                key = stream.keys[position]
            else:
                before = stream.keys[position - 1] if guess is None else guess
                key = guess = mix(before, guess_at(seed, entry.index, position))
            for group in range(len(self._windows)) if self._has_blocks else ():
                block, slot = self._place(entry.name, position, group)
                self._device.setdefault(block, {})[slot] = _of_group(key, group)
                self._device[block].pop(_STATE, None)

    # --- states -------------------------------------------------------------------------------------------------------

    def _begin(self, plan: StepPlan, entries: list[ScheduledSequence], requests: dict[str, Request]) -> dict[str, bool]:
        """Whether each row begins with the states of its own past; others do only behind a step that failed."""
        reads = {read.name: read for read in _states_of(plan).to_read}
        assert len(reads) == len(_states_of(plan).to_read) and reads.keys() <= {entry.name for entry in entries}
        self._check_apart(plan)
        found = {}
        for entry in entries:
            self._recall(entry, requests[entry.request_id])
            read, start = reads.get(entry.name), entry.computed_before
            assert read is None or read.num_tokens == start > 0
            blocks = self.held[entry.name][: self._num_states] if read is None else read.block_ids
            states = [self._device.get(block, {}).get(_STATE) for block in blocks]
            found[entry.name] = not start or states == self._states(entry.name, start)
            assert found[entry.name] or self._failed, (
                f"{entry.name} begins at token {start} with other states: {states}"
            )
        return found

    def _check_apart(self, plan: StepPlan) -> None:
        """Nothing that a step reads or keeps is used otherwise in it, or kept twice; it may be read by several rows."""
        kept = [block for keep in _states_of(plan).to_keep for block in keep.block_ids]
        read = {block for each in _states_of(plan).to_read for block in each.block_ids}
        assert len({*kept, *read}) == len(kept) + len(read), "a step reads or keeps in a block twice"
        used = {block for entry in plan.scheduled for block in self._used(entry)}
        assert used.isdisjoint({0, *kept, *read}) and all(
            len(k.block_ids) == self._num_states for k in _states_of(plan).to_keep
        )

    def _used(self, entry: ScheduledSequence) -> list[int]:
        """Blocks of its states, and those of the tokens that it computes or looks at. Others behind windows were freed."""
        used = self.held[entry.name][: self._num_states]
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, entry.computed_before - window + 1)
            places = range(first, entry.computed_before + entry.num_tokens)
            used += [self._place(entry.name, position, group)[0] for position in places]
        return used

    def _end(
        self, plan: StepPlan, entries: list[ScheduledSequence], begun: dict[str, bool], result: StepResult
    ) -> None:
        """The states after the step's tokens without rejected drafts, and the checkpoints taken during it, none behind a draft."""
        reach = {e.name: (e.computed_before, e.computed_before + e.num_tokens - e.num_drafts) for e in entries}
        written = []
        for entry in entries:
            end, right = reach[entry.name][1], result.tokens.get(entry.name, [])[:-1]
            if right:
                self._streams[entry.name].set_tokens(end, right)
            written.append((entry.name, end + len(right), self.held[entry.name][: self._num_states]))
        for name, num_tokens, blocks in _states_of(plan).to_keep:
            assert reach[name][0] < num_tokens <= reach[name][1]
            written.append((name, num_tokens, list(blocks)))
        for name, num_tokens, blocks in written:
            states = self._states(name, num_tokens) if begun[name] else [None] * self._num_states
            self._device.update({b: {_STATE: s} for b, s in zip(blocks, states, strict=True) if s is not None})
            if not begun[name]:
                self._device.update({block: {} for block in blocks})

    def _states(self, name: str, num_tokens: int) -> list[int]:
        """The states after so many tokens: a number for each block; none if a step that failed was to draw the last."""
        keys = self._streams[name].keys
        if len(keys) < num_tokens:
            return []
        key = keys[num_tokens - 1]
        return [mix(key, num_tokens, index, 13) for index in range(self._num_states)]


def _states_of(plan: StepPlan) -> StateMoves:
    """What a plan says of states; nothing if it has no work."""
    return plan.states or StateMoves()


def _of_group(key: int, group: int) -> int:
    """What a cache group has in a slot."""
    return mix(key, group) if group else key


def _move(source: dict[int, dict[int, int]], target: dict[int, dict[int, int]], pairs: list[tuple[int, int]]) -> None:
    """All pairs read what was there before (R124): so none may need what one before it gives."""
    written: set[int] = set()
    for block, destination in pairs if source is target else ():
        assert block not in written
        written.add(destination)
    contents = [(destination, dict(source.get(block, {}))) for block, destination in pairs]
    target.update(contents)


def _sample(entry: ScheduledSequence, request: Request, seed: int, result: StepResult) -> None:
    """What one row of a step that reached its last token gives."""
    group = next(g for g in request.groups if any(s.name == entry.name for s in g.sequences))
    position = entry.computed_before + entry.num_tokens - entry.num_drafts
    if request.beam is not None:
        result.candidates[entry.name] = candidates_at(seed, entry.index, position, group.width)
    elif group.width > len(group.sequences):
        result.children[entry.name] = [token_at(seed, entry.index, position, k) for k in range(group.width)]
        result.logprobs[entry.name] = [-0.5 - k for k in range(group.width)]
    else:
        tokens = [token_at(seed, entry.index, position)]
        for guessed in range(position, position + entry.num_drafts):
            if guess_at(seed, entry.index, guessed) != tokens[-1]:
                break
            tokens.append(token_at(seed, entry.index, guessed + 1))
        result.tokens[entry.name] = tokens
        result.logprobs[entry.name] = [-0.25] * len(tokens)
