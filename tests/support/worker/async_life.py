"""A scheduler's life with plans in flight: it plans step k + `depth` when it has read result k, and knows no later token.

Random, seeded, and legal: chunks, pauses, late arrivals, rows that stop or are preempted with a token on the way and come back by
recompute, by swap, or with their blocks copied; guesses, beams, children, grammars, penalties, vectors, scored prompts, rows whose
cache is spoilt. What it asks of the worker depends on the tokens it reads and on nothing else.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from tests.support.worker.builders import Change, Row, rare, step
from tests.support.worker.sampled_rows import GRAMMAR, toy_allows
from worker_svc.engine import Pending

BLOCK_SIZE = 16
NUM_BLOCKS, NUM_HOST_BLOCKS = 96, 40
ROOM = 4
MOST_ROWS = 7
MOST_TOKENS = 22
KINDS = (
    "plain", "plain", "sampled", "tops", "penalties", "bad words", "grammar", "grammar", "drafts", "drafts", "children", "beam",
    "vector", "prompt", "spoilt",
)  # fmt: skip
_NOT_SEVERAL = {"drafts", "beam", "vector"}


def _sampling(kind: str) -> worker_pb2.RowOptions | None:
    sampling = common_pb2.ResolvedSampling
    return {
        "tops": rare(sampling(num_top_logprobs=3)),
        "penalties": rare(sampling(repetition_penalty=1.4, frequency_penalty=0.7)),
        "bad words": rare(
            sampling(bad_words=[common_pb2.TokenSequence(token_ids=wire_arrays.pack([a, a + 1])) for a in range(60)])
        ),
        "grammar": rare(sampling(grammar=GRAMMAR)),
        "children": rare(num_children=3),
        "beam": rare(num_candidates=4),
        "vector": rare(task=common_pb2.TASK_EMBED_MEAN),
        "prompt": rare(sampling(num_prompt_logprobs=2)),
    }.get(kind)


@dataclass(eq=False)
class Life:
    """One request. `tokens`: all that were read; `num_promised`: tokens it has when all steps sent are done."""

    name: int
    kind: str
    tokens: list[int]
    num_prompt: int
    row: int = -1
    life: int = 0
    blocks: list[int] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)
    computed: int = 0
    num_promised: int = 0
    num_unread: int = 0
    repeats: bool = False
    is_over: bool = False
    came_back_by: str = ""
    told: list[int] = field(default_factory=list)
    was_drawn: bool = False

    @property
    def decodes(self) -> bool:
        return self.computed == self.num_promised - 1 and self.num_promised > self.num_prompt


class Scheduler:
    """`launch`: the worker's; `spoil(block)`: fills a block with NaN; `on_result`: told of each. `results`: of each step, without
    times; `events`: what happened."""

    def __init__(
        self,
        launch: Callable[[worker_pb2.SchedulerOutputs], Pending],
        spoil: Callable[[int], None],
        seed: int,
        *,
        num_requests: int = len(KINDS),
        depth: int = 2,
        waits_elsewhere: bool = True,
        on_result: Callable[[worker_pb2.WorkerOutputs], None] = lambda _: None,
    ) -> None:
        self.rng = random.Random(seed)
        self._on_result = on_result
        self._launch, self._spoil, self._depth, self._waits = launch, spoil, depth, waits_elsewhere
        self._num_requests, self._num_made = num_requests, 0
        self._lives: Counter[int] = Counter()
        self._free, self._free_hosts = list(range(NUM_BLOCKS)), list(range(NUM_HOST_BLOCKS))
        self._leaving_blocks: list[int] = []
        self.running: list[Life] = []
        self.away: list[Life] = []
        self._by_life: dict[tuple[int, int], Life] = {}
        self._in_flight: deque[tuple[Pending, list[Life]]] = deque()
        self.results: list[worker_pb2.WorkerOutputs] = []
        self.tokens: dict[int, list[int]] = {}
        self.events: Counter[str] = Counter()
        self._step_id = 0
        self._computing: list[Life] = []

    def run(self) -> None:
        """Until all requests are over."""
        while self._num_made < self._num_requests or self.running or self.away:
            if len(self._in_flight) == self._depth:
                self._read()
            self._send()
            assert self._step_id < 1000, "it does not come to an end"
        while self._in_flight:
            self._read()

    # --- a step ------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        self._step_id += 1
        parts: dict[str, list] = {name: [] for name in ("add", "change", "remove", "swap_in", "swap_out", "copy")}
        leaving, self._leaving_blocks = self._leaving_blocks, []
        self._free += leaving
        self._computing = []
        self._dismiss(parts)
        for life in self.running:
            self._go_on(life, parts)
        self._bring_back(parts)
        self._admit(parts)
        several = all(life.decodes and life.kind not in _NOT_SEVERAL for life in self.running)
        num_steps = self.rng.choice((1, 2, 3)) if several and not parts["add"] and not parts["change"] else 1
        if num_steps > 1:
            self.events["multi-step"] += 1
            for life in self.running:
                life.computed, life.num_promised = life.computed + num_steps - 1, life.num_promised + num_steps - 1
        message = step(self._step_id, num_decode_steps=num_steps, **parts)
        if self._in_flight and not self._in_flight[-1][0].is_ready:
            self.events["launched ahead"] += 1
        pending = self._launch(message)
        for life in self._computing:
            life.num_unread += 1
        self._in_flight.append((pending, self._computing))

    def _read(self) -> None:
        pending, lives = self._in_flight.popleft()
        if self._waits:
            pending.wait()
        result = pending.finish()
        result.ClearField("timings")
        self.results.append(result)
        self._on_result(result)
        for life in lives:
            life.num_unread -= 1
        rows, incarnations = (
            wire_arrays.unpack(result.rows, "rows"),
            wire_arrays.unpack(result.incarnations, "incarnations"),
        )
        counts = wire_arrays.unpack(result.num_tokens, "num_tokens")
        runs = wire_arrays.split(wire_arrays.unpack(result.token_ids, "token_ids"), counts, "token_ids")
        flags = wire_arrays.unpack(result.flags, "flags", wire_arrays.U8)
        for row, number, run, flag in zip(rows.tolist(), incarnations.tolist(), runs, flags.tolist(), strict=True):
            self._take(self._by_life[row, number], run.tolist(), flag)
        self._take_candidates(result)
        for vector in result.embeddings:
            self._by_life[vector.row, vector.incarnation].is_over = True

    def _take(self, life: Life, tokens: list[int], flag: int) -> None:
        if flag or life.is_over:
            self.events["failed" if flag else "late token dropped"] += 1
            life.is_over = True
            return
        if life.kind == "children" and len(tokens) > 1 and len(life.tokens) == life.num_prompt:
            # One for each child; later, several are of several decode steps.
            self.events["children"] += 1
            tokens = tokens[:1]
        if life not in self.running:
            self.events["late token kept"] += 1
        for token in tokens:
            if life.kind == "grammar":
                assert toy_allows(life.tokens[life.num_prompt :], token)
            life.tokens.append(token)
            if len(life.tokens) - life.num_prompt >= MOST_TOKENS or token % 23 == 0:
                life.is_over = True
                break
        if life.kind == "drafts" and life.was_drawn:
            self.events["draft accepted"] += len(tokens) - 1
            life.num_promised, life.computed = len(life.tokens), len(life.tokens) - 1
            life.was_drawn = False

    def _take_candidates(self, result: worker_pb2.WorkerOutputs) -> None:
        found = result.candidates
        runs = wire_arrays.split(
            wire_arrays.unpack(found.token_ids, "ids"), wire_arrays.unpack(found.counts, "counts"), "ids"
        )
        lives = zip(
            wire_arrays.unpack(found.rows, "rows").tolist(),
            wire_arrays.unpack(found.incarnations, "i").tolist(),
            strict=True,
        )
        for key, run in zip(lives, runs, strict=True):
            life, token = self._by_life[key], int(run[len(run) // 2])
            self.events["beam"] += 1
            life.tokens.append(token)
            life.told = [token]
            life.is_over = len(life.tokens) - life.num_prompt >= MOST_TOKENS // 3

    # --- rows leave --------------------------------------------------------------------------------------------------

    def _dismiss(self, parts: dict[str, list]) -> None:
        for life in list(self.running):
            if life.is_over:
                self._remove(life, parts)
                self.tokens[life.name] = life.tokens
                self._leaving_blocks += life.blocks
            elif life.kind not in {"drafts", "beam", "vector"} and self.rng.random() < 0.06 and life.computed:
                self._preempt(life, parts)

    def _remove(self, life: Life, parts: dict[str, list]) -> None:
        self.running.remove(life)
        parts["remove"].append(life.row)

    def _preempt(self, life: Life, parts: dict[str, list]) -> None:
        if life.num_promised == life.num_prompt and life.kind in {"prompt", "spoilt"}:
            return
        self._remove(life, parts)
        self.away.append(life)
        life.came_back_by = self.rng.choice(("recompute", "swap", "copy")) if life.decodes else "recompute"
        if life.came_back_by == "swap" and len(self._free_hosts) < ROOM:
            life.came_back_by = "recompute"
        if life.came_back_by == "swap":
            life.hosts = [self._free_hosts.pop() for _ in life.blocks]
            parts["swap_out"] += list(zip(life.blocks, life.hosts, strict=True))
        if life.came_back_by != "copy":
            self._leaving_blocks += life.blocks

    # --- rows join ---------------------------------------------------------------------------------------------------

    def _index(self) -> int:
        taken = {life.row for life in self.running}
        return next(index for index in range(100) if index not in taken)

    def _bring_back(self, parts: dict[str, list]) -> None:
        """Sequences of which every result was read, so that their tokens are known."""
        for life in list(self.away):
            if life.is_over:
                self.away.remove(life)
                self.tokens[life.name] = life.tokens
                self._leaving_blocks += life.blocks if life.came_back_by == "copy" else []
                self._free_hosts += life.hosts
                life.hosts = []
            elif not life.num_unread and len(self.running) < MOST_ROWS and len(self._free) >= ROOM:
                if parts["swap_out"] and life.came_back_by == "swap":
                    continue
                self.away.remove(life)
                self._return(life, parts)

    def _return(self, life: Life, parts: dict[str, list]) -> None:
        assert len(life.tokens) == life.num_promised
        self.events[life.came_back_by] += 1
        blocks = [self._free.pop() for _ in range(ROOM)]
        if life.came_back_by == "recompute":
            life.computed = 0
        elif life.came_back_by == "swap":
            parts["swap_in"] += list(zip(life.hosts, blocks, strict=True))
            self._free_hosts += life.hosts
            life.hosts = []
        else:
            parts["copy"] += list(zip(life.blocks, blocks, strict=True))
            self._leaving_blocks += life.blocks
        self._join(life, blocks, parts)

    def _admit(self, parts: dict[str, list]) -> None:
        rng = self.rng
        while (
            self._num_made < self._num_requests
            and len(self.running) < MOST_ROWS
            and len(self._free) >= ROOM
            and rng.random() < 0.5
        ):
            kind = KINDS[self._num_made % len(KINDS)]
            pattern = [rng.randrange(64) for _ in range(rng.randint(2, 5))]
            prompt = (pattern * 20)[: rng.randint(4, 26)]
            life = Life(self._num_made, kind, prompt, len(prompt), num_promised=len(prompt))
            self._num_made += 1
            self._join(life, [self._free.pop() for _ in range(ROOM)], parts)

    def _join(self, life: Life, blocks: list[int], parts: dict[str, list]) -> None:
        life.row, life.blocks = self._index(), blocks
        self._lives[life.row] += 1
        life.life = self._lives[life.row]
        self._by_life[life.row, life.life] = life
        left = len(life.tokens) - life.computed
        num_tokens = left if left == 1 else self.rng.choice((left, self.rng.randint(1, left)))
        options = _sampling(life.kind)
        if life.kind == "children" and life.num_promised > life.num_prompt:
            options = None
        heat = 0.9 if life.kind in {"sampled", "children", "grammar"} else 0.0
        row = Row(
            life.row, list(life.tokens), blocks, num_tokens, incarnation=life.life, num_computed=life.computed,
            num_prompt=life.num_prompt, temperature=heat, seed=life.name, logprobs=life.kind != "plain", top_p=0.9 if heat else 1.0,
            top_k=40 if life.kind == "sampled" else 0, options=options,
        )  # fmt: skip
        parts["add"].append(row)
        self.running.append(life)
        self._computes(life, num_tokens)

    # --- rows go on --------------------------------------------------------------------------------------------------

    def _computes(self, life: Life, num_tokens: int) -> None:
        life.computed += num_tokens
        self._computing += [life] if num_tokens else []
        life.repeats = life.computed == life.num_promised and life.kind not in {"beam", "vector"}
        life.num_promised += life.repeats

    def _go_on(self, life: Life, parts: dict[str, list]) -> None:
        left, rng = life.num_promised - life.computed, self.rng
        if life.kind == "beam" and left == 0:
            if life.told:
                life.num_promised += 1
                self._mention(life, 1, parts, told=life.told)
                life.told = []
        elif life.kind == "vector" and left == 0:
            pass
        elif not life.decodes:
            if rng.random() < 0.2:
                self._mention(life, 0, parts)
            else:
                self.events["chunk"] += 1
                self._mention(life, rng.choice((left, rng.randint(1, left))), parts)
        elif life.kind == "drafts":
            self._guess(life, parts)
        elif not life.repeats or rng.random() < 0.1:
            self._mention(life, 1 if not life.repeats or rng.random() < 0.5 else 0, parts)
        else:
            if life.kind == "spoilt" and life.num_promised == life.num_prompt + 4:
                self._spoil(life.blocks[0])
                self.events["spoilt"] += 1
            self._computes(life, 1)

    def _guess(self, life: Life, parts: dict[str, list]) -> None:
        """Guesses when every token is read: how many come of them is not known before."""
        if life.num_unread:
            if life.repeats:
                self._mention(life, 0, parts)
            return
        if self.rng.random() < 0.4:
            self._mention(life, 1, parts)
            return
        self.events["guess"] += 1
        life.was_drawn = life.repeats = True
        self._computing.append(life)
        parts["change"].append(Change(life.row, 4, incarnation=life.life, num_drafts=3))

    def _mention(self, life: Life, num_tokens: int, parts: dict[str, list], **told: list[int]) -> None:
        parts["change"].append(Change(life.row, num_tokens, incarnation=life.life, **told))
        self._computes(life, num_tokens)
