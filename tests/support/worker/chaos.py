"""Random but legal scheduling of an engine: everything a scheduler may do to a row, and nothing of what it may not.

Chunks, pauses, late arrivals, recompute, swap, prefix hits on blocks that others use, forks that copy on write, several decode
steps in a message, blocks in any order. A row's tokens must not depend on any of it.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.worker.driver import BLOCK_SIZE, NUM_CPU_STATES, NUM_STATES, Driver, Row, ids_of, state_ids_of
from worker_svc.executor.model_engine import ModelEngine

NUM_BLOCKS, NUM_CPU_BLOCKS = 160, 40
EVENTS = {"chunk", "recompute", "swap", "prefix hit", "copy on write", "multi-step", "long neighbour"}
STATE_EVENTS = {"checkpoint", "checkpoint hit"}
_LONG = 100
_MOST_FORKS = 3


def origin(name: str) -> str:
    """The prompt that a row, or the row it was forked from, began with."""
    return name.partition("+")[0]


class Chaos:
    """One seeded life of several rows, until each has `num_tokens` new tokens or a few more. `events`: what happened.

    `poisoned`: the pools begin full of NaN, and unreferenced blocks are filled with NaN after every step.
    """

    def __init__(
        self,
        engine: ModelEngine,
        prompts: Mapping[str, Sequence[int]],
        seed: int,
        *,
        num_tokens: int = 10,
        poisoned: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.free, self.host_free = list(range(NUM_BLOCKS)), list(range(NUM_CPU_BLOCKS))
        self.rng.shuffle(self.free)
        self.rng.shuffle(self.host_free)
        self.users: Counter[int] = Counter()
        self.engine, self.driver = engine, Driver(engine, take_block=self._take, take_state=self._take_state)
        self.has_states = engine._loaded is not None and engine._loaded.num_state_blocks > 0
        self.states_free, self.host_states_free = list(range(NUM_STATES)), list(range(NUM_CPU_STATES))
        self.checkpoints: dict[int, tuple[int, ...]] = {}
        self._new_checkpoints: dict[int, tuple[int, ...]] = {}
        self._leaving_states: list[int] = []
        self.waiting = [(name, list(prompt), len(prompt)) for name, prompt in prompts.items()]
        self.rng.shuffle(self.waiting)
        self.swapped: list[tuple[str, Row, list[int], int]] = []
        self.events: set[str] = set()
        self.num_steps, self.num_tokens, self.poisoned = 0, num_tokens, poisoned
        self.num_forks = 0
        self._room = 0
        self._leaving: list[int] = []

    def run(self) -> Driver:
        """All of it; the driver then has every row's tokens, logprobs and logits."""
        if self.poisoned:
            self.engine.cache.device_pool.fill_(float("nan"))
            self.engine.cache.host_pool.fill_(float("nan"))
        while self.waiting or self.swapped or self.driver.rows:
            self._step()
        return self.driver

    def _step(self) -> None:
        num_decode_steps = self.rng.choice((1, 1, 1, 2, 3))
        self._room = num_decode_steps - 1
        self._leave()
        self._return()
        self._advance()
        self._fork()
        self._arrive()
        self._keep()
        self._look(num_decode_steps)
        self.driver.run(num_decode_steps)
        assert not any(self.driver.flags.values()), "a row failed: its logits were not finite"
        self.num_steps += 1
        self._settle()

    def _look(self, num_decode_steps: int) -> None:
        """Events that are seen from the step as a whole."""
        step = self.driver.step
        works = [(row, n) for row, n in step.added] + [(row, n) for row, n, _ in step.changed]
        if num_decode_steps > 1 and any(n == len(row.token_ids) - row.computed for row, n in works):
            self.events.add("multi-step")
        if any(row.computed + n > _LONG for row, n in works) and any(
            n and row.computed + n < _LONG // 2 for row, n in works
        ):
            self.events.add("long neighbour")

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _take(self) -> int:
        block = self.free.pop()
        self.users[block] = 1
        return block

    def _take_state(self) -> int:
        """A free one, or that of the oldest checkpoint which no row of this step begins with."""
        read = {state for _, _, state in self.driver.step.reads}
        if not self.states_free:
            oldest = next(state for state in self.checkpoints if state not in read)
            del self.checkpoints[oldest]
            return oldest
        return self.states_free.pop()

    def _settle(self) -> None:
        """Blocks given up in a step are free after it: its swaps and copies still read them."""
        self.states_free[:0], self._leaving_states = self._leaving_states, []
        self.checkpoints |= self._new_checkpoints
        self._new_checkpoints = {}
        self.users.subtract(self._leaving)
        freed = [block for block in dict.fromkeys(self._leaving) if self.users[block] == 0]
        self._leaving = []
        self.free[:0] = freed
        if self.poisoned:
            self.engine.cache.device_pool[:, :, ids_of(self.engine, self.free)] = float("nan")
            self.engine.cache.host_pool[:, :, ids_of(self.engine, self.host_free)] = float("nan")
            self.engine.cache.device_pool[:, :, state_ids_of(self.engine, self.states_free)] = float("nan")
            host_ids = state_ids_of(self.engine, self.host_states_free, on_host=True)
            self.engine.cache.host_pool[:, :, host_ids] = float("nan")

    # --- what may happen ---------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Rows that are done, preempted by recompute, or swapped out."""
        for name, row in list(self.driver.rows.items()):
            done, chance = len(self.driver.tokens[name]) >= self.num_tokens, self.rng.random()
            if not done and (chance > 0.12 or row.computed == 0):
                continue
            self.driver.remove(name)
            self._leaving += row.blocks
            self._leaving_states.append(row.state)
            has_room = len(self.host_free) >= len(row.blocks) and self.host_states_free
            if not done and chance < 0.06 and has_room:
                hosts, host_state = [self.host_free.pop() for _ in row.blocks], self.host_states_free.pop()
                self.driver.step.swap_out += list(zip(row.blocks, hosts, strict=True))
                self.driver.step.state_swap_out.append((row.state, host_state))
                self.swapped.append((name, row, hosts, host_state))
                self.events.add("swap")
            elif not done:
                self.waiting.append((name, row.token_ids, row.num_prompt))
                self.events.add("recompute")

    def _return(self) -> None:
        """A swapped row comes back into other blocks."""
        if not self.swapped or self.driver.step.swap_out or self.rng.random() < 0.5:
            return
        name, row, hosts, host_state = self.swapped.pop()
        blocks, state = [self._take() for _ in hosts], self._take_state()
        self.driver.step.swap_in += list(zip(hosts, blocks, strict=True))
        self.driver.step.state_swap_in.append((host_state, state))
        self.host_free[:0] = hosts
        self.host_states_free.insert(0, host_state)
        self._add(name, row.token_ids, row.num_prompt, blocks, row.computed, state=state)

    def _advance(self) -> None:
        new = {id(row) for row, _ in self.driver.step.added}
        for name, row in self.driver.rows.items():
            if id(row) in new:
                continue
            if self.rng.random() < 0.1:
                self.driver.pause(name)
            else:
                self.driver.compute(name, self._chunk(len(row.token_ids) - row.computed), room=self._room)

    def _fork(self) -> None:
        """A second row goes on from where a decoding one stands; the block they would both write into is copied."""
        new = {id(row) for row, _ in self.driver.step.added}
        for name, row in list(self.driver.rows.items()):
            here = row.computed == len(row.token_ids) - 1 and row.computed % BLOCK_SIZE and id(row) not in new
            if not here or self.num_forks == _MOST_FORKS or self.rng.random() > 0.15:
                continue
            self.num_forks += 1
            child, shared = f"{name}+{self.num_forks}", row.blocks[: row.computed // BLOCK_SIZE]
            self.users.update(shared)
            blocks = [*shared, self._take()]
            self.driver.step.copies.append((row.blocks[len(shared)], blocks[-1]))
            state = self._take_state()
            self.driver.step.state_copies.append((row.state, state))
            self.driver.tokens[child] = list(self.driver.tokens[name])
            self.driver.logprobs[child] = list(self.driver.logprobs[name])
            self._add(child, row.token_ids, row.num_prompt, blocks, row.computed, state=state)
            self.events.add("copy on write")

    def _arrive(self) -> None:
        while self.waiting and self.rng.random() < 0.4:
            self.waiting.sort(key=lambda entry: len(self._cached(entry[1])))
            name, tokens, num_prompt = self.waiting.pop()
            blocks, reads = self._cached(tokens), None
            if self.has_states:
                blocks, reads = self._with_checkpoint(tokens, blocks)
            self.users.update(blocks)
            self.events |= {"prefix hit"} if blocks else set()
            self._add(name, tokens, num_prompt, blocks, len(blocks) * BLOCK_SIZE, reads=reads)

    def _cached(self, tokens: Sequence[int]) -> list[int]:
        """Most full blocks at the beginning of `tokens` that a row holds computed; never the last token's."""
        best: list[int] = []
        for row in self.driver.rows.values():
            same = 0
            while same < min(row.computed, len(tokens) - 1) and row.token_ids[same] == tokens[same]:
                same += 1
            best = max(best, row.blocks[: same // BLOCK_SIZE], key=len)
        return best

    def _with_checkpoint(self, tokens: Sequence[int], blocks: list[int]) -> tuple[list[int], int | None]:
        """As many of the blocks as there is a checkpoint for, and that checkpoint."""
        for count in range(len(blocks), 0, -1):
            prefix = tuple(tokens[: count * BLOCK_SIZE])
            for state, kept in self.checkpoints.items():
                if kept == prefix:
                    self.events.add("checkpoint hit")
                    return blocks[:count], state
        return [], None

    def _keep(self) -> None:
        """Checkpoints at some ends of blocks that this step computes."""
        step, names = self.driver.step, {id(row): name for name, row in self.driver.rows.items()}
        works = [(row, n) for row, n in step.added] + [(row, n) for row, n, _ in step.changed]
        for row, n in works if self.has_states else ():
            for length in range(BLOCK_SIZE, min(len(row.token_ids), row.computed + n) + 1, BLOCK_SIZE):
                if length > row.computed and self.rng.random() < 0.7:
                    state = self._take_state()
                    self._new_checkpoints[state] = tuple(row.token_ids[:length])
                    self.driver.keep(names[id(row)], length, state)
                    self.events.add("checkpoint")

    def _options(self, _name: str) -> dict[str, Any]:
        """Further options of a row."""
        return {}

    def _add(
        self,
        name: str,
        tokens: Sequence[int],
        num_prompt: int,
        blocks: Sequence[int],
        computed: int,
        **states: int | None,
    ) -> None:
        num_tokens, options = self._chunk(len(tokens) - computed), states | self._options(name)
        self.driver.add(
            name,
            tokens,
            num_tokens,
            num_prompt=num_prompt,
            blocks=blocks,
            computed=computed,
            room=self._room,
            **options,
        )

    def _chunk(self, left: int) -> int:
        count = self.rng.choice((left, self.rng.randint(1, left)))
        self.events |= {"chunk"} if count < left else set()
        return count
