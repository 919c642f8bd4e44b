"""Random but legal scheduling of an engine: everything a scheduler may do to a row, and nothing of what it may not.

Chunks, pauses, late arrivals, recompute, swap, prefix hits on blocks that others use, forks that copy on write, several decode
steps in a message, blocks in any order. A row's tokens must not depend on any of it.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.support.worker.driver import BLOCK_SIZE, Driver, Row, ids_of
from worker_svc.executor.model_engine import ModelEngine

NUM_BLOCKS, NUM_CPU_BLOCKS = 160, 40
EVENTS = {"chunk", "recompute", "swap", "prefix hit", "copy on write", "multi-step", "long neighbour"}
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
        self.engine, self.driver = engine, Driver(engine, take_block=self._take)
        self.waiting = [(name, list(prompt), len(prompt)) for name, prompt in prompts.items()]
        self.rng.shuffle(self.waiting)
        self.swapped: list[tuple[str, Row, list[int]]] = []
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

    def _settle(self) -> None:
        """Blocks given up in a step are free after it: its swaps and copies still read them."""
        self.users.subtract(self._leaving)
        freed = [block for block in dict.fromkeys(self._leaving) if self.users[block] == 0]
        self._leaving = []
        self.free[:0] = freed
        if self.poisoned:
            self.engine.cache.device_pool[:, :, ids_of(self.engine, self.free)] = float("nan")
            self.engine.cache.host_pool[:, :, ids_of(self.engine, self.host_free)] = float("nan")

    # --- what may happen ---------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Rows that are done, preempted by recompute, or swapped out."""
        for name, row in list(self.driver.rows.items()):
            done, chance = len(self.driver.tokens[name]) >= self.num_tokens, self.rng.random()
            if not done and (chance > 0.12 or row.computed == 0):
                continue
            self.driver.remove(name)
            self._leaving += row.blocks
            if not done and chance < 0.06 and len(self.host_free) >= len(row.blocks):
                hosts = [self.host_free.pop() for _ in row.blocks]
                self.driver.step.swap_out += list(zip(row.blocks, hosts, strict=True))
                self.swapped.append((name, row, hosts))
                self.events.add("swap")
            elif not done:
                self.waiting.append((name, row.token_ids, row.num_prompt))
                self.events.add("recompute")

    def _return(self) -> None:
        """A swapped row comes back into other blocks."""
        if not self.swapped or self.driver.step.swap_out or self.rng.random() < 0.5:
            return
        name, row, hosts = self.swapped.pop()
        blocks = [self._take() for _ in hosts]
        self.driver.step.swap_in += list(zip(hosts, blocks, strict=True))
        self.host_free[:0] = hosts
        self._add(name, row.token_ids, row.num_prompt, blocks, row.computed)

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
            self.driver.tokens[child] = list(self.driver.tokens[name])
            self.driver.logprobs[child] = list(self.driver.logprobs[name])
            self._add(child, row.token_ids, row.num_prompt, blocks, row.computed)
            self.events.add("copy on write")

    def _arrive(self) -> None:
        while self.waiting and self.rng.random() < 0.4:
            self.waiting.sort(key=lambda entry: len(self._cached(entry[1])))
            name, tokens, num_prompt = self.waiting.pop()
            blocks = self._cached(tokens)
            self.users.update(blocks)
            self.events |= {"prefix hit"} if blocks else set()
            self._add(name, tokens, num_prompt, blocks, len(blocks) * BLOCK_SIZE)

    def _cached(self, tokens: Sequence[int]) -> list[int]:
        """Most full blocks at the beginning of `tokens` that a row holds computed; never the last token's."""
        best: list[int] = []
        for row in self.driver.rows.values():
            same = 0
            while same < min(row.computed, len(tokens) - 1) and row.token_ids[same] == tokens[same]:
                same += 1
            best = max(best, row.blocks[: same // BLOCK_SIZE], key=len)
        return best

    def _add(self, name: str, tokens: Sequence[int], num_prompt: int, blocks: Sequence[int], computed: int) -> None:
        num_tokens = self._chunk(len(tokens) - computed)
        self.driver.add(
            name, tokens, num_tokens, num_prompt=num_prompt, blocks=blocks, computed=computed, room=self._room
        )

    def _chunk(self, left: int) -> int:
        count = self.rng.choice((left, self.rng.randint(1, left)))
        self.events |= {"chunk"} if count < left else set()
        return count
