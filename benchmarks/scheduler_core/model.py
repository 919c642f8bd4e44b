"""A brute-force model of the scheduler core: one plain object per sequence, no columns, no ledger, no shortcuts.

The model sees inputs and outputs (requests, plans, results, outcomes) and inspects the core only at the end.
It covers the runs of benchmarks.scheduler_core.runs: all sequences fit, none is preempted, all end by max_tokens,
prompts differ.
"""

import hashlib
import struct
from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc.core.plan import ScheduledSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.core.scheduler import Scheduler

_MOST_DIFFERENCES = 20


@dataclass(slots=True)
class Life:
    """A sequence.

    `given`: tokens from results; `told`: tokens reported by outcomes; `promised`: tokens of plans in flight.
    """

    request: Request
    index: int
    prompt: list[int]
    max_tokens: int
    num_computed: int = 0
    promised: int = 0
    started: bool = False
    given: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def known(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.given

    @property
    def is_over(self) -> bool:
        """True if it has all its tokens."""
        return len(self.given) == self.max_tokens

    @property
    def is_wanted(self) -> bool:
        """True if the next step computes something of it."""
        missing = self.max_tokens - len(self.given) - self.promised
        return missing > 0 and len(self.prompt) + len(self.given) + self.promised > self.num_computed


class Model:
    """Follows one core. Keeps the first differences as sentences."""

    def __init__(self, block_size: int, *, caching: bool) -> None:
        self._block_size = block_size
        self._caching = caching
        self._lives: dict[str, Life] = {}
        self.results: dict[int, dict[str, int]] = {}
        self._differences: list[str] = []

    def added(self, request: Request) -> None:
        """Record a request added to the core."""
        for index in range(request.n):
            life = Life(request, index, list(request.prompt_token_ids), request.stop.max_tokens)
            self._lives[f"{request.request_id}/{index}"] = life

    def planned(self, plan: StepPlan, result: StepResult) -> None:
        """Record a plan and the result that its worker will return."""
        wanted = {name for name, life in self._lives.items() if life.is_wanted}
        entries = plan.scheduled
        scheduled = {entry.name for entry in entries}
        self._same(f"step {plan.step}: scheduled and not wanted", sorted(scheduled - wanted), [])
        self._same(f"step {plan.step}: wanted and not scheduled", sorted(wanted - scheduled), [])
        self._same(f"step {plan.step}: shares of {len(scheduled)} sequences", len(entries), len(scheduled))
        for entry in entries:
            if (life := self._lives.get(entry.name)) is not None:
                self._compute(plan.step, entry, life)
        fast = plan.fast.names() if plan.fast is not None else []
        column = [] if result.column is None else result.column.tolist()
        tokens = {name: ids[0] for name, ids in result.tokens.items()}
        self.results[plan.step] = {**tokens, **dict(zip(fast, column, strict=True))}

    def updated(self, result: StepResult, outcome: StepOutcome) -> None:
        """Record an applied result and its outcome."""
        ends = []
        for name, token in self.results.pop(result.step).items():
            life = self._lives[name]
            life.given.append(token)
            life.promised -= 1
            if life.is_over:
                ends.append((name, SequenceStatus.FINISHED_LENGTH_CAPPED, life.max_tokens))
        for run in outcome.runs:
            life = self._lives[run.name]
            if run.offset != len(life.told):
                self._same(f"{run.name}: offset of new tokens", run.offset, len(life.told))
            life.told += run.token_ids
        told = sorted((e.name, e.status, e.num_output_tokens) for e in outcome.ended)
        self._same(f"step {result.step}: ends", told, sorted(ends))
        for name, _, _ in ends:
            self._same(f"{name}: outputs", self._lives[name].told, self._lives[name].given)
            del self._lives[name]

    def differences_of(self, core: Scheduler) -> list[str]:
        """All differences noted so far and those that the core's state shows now. No plan may be in flight."""
        live = sorted({life.request.request_id for life in self._lives.values()})
        self._same("live requests", sorted(core.state.requests), live)
        for name, life in self._lives.items():
            self._check_counters(name, life, core)
        self._check_tables(core)
        self._differences += core.check_integrity()
        return self._differences[:_MOST_DIFFERENCES]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _same(self, what: str, got: object, expected: object) -> None:
        if got != expected and len(self._differences) < _MOST_DIFFERENCES:
            self._differences.append(f"{what}: {_short(got)}, expected {_short(expected)}")

    def _compute(self, step: int, entry: ScheduledSequence, life: Life) -> None:
        if not life.started:
            life.started = True
            life.num_computed = self._num_shared(life) * self._block_size
        num_tokens = len(life.prompt) + len(life.given) + life.promised - life.num_computed
        got, expected = (entry.computed_before, entry.num_tokens, entry.samples), (life.num_computed, num_tokens, True)
        if got != expected:
            self._same(f"step {step}: {entry.name}: offset, tokens, samples", got, expected)
        life.num_computed += num_tokens
        life.promised += 1

    def _num_shared(self, life: Life) -> int:
        """Blocks of an older sample that a younger one shares; the last prompt token is always its own."""
        return (len(life.prompt) - 1) // self._block_size if life.index else 0

    def _check_counters(self, name: str, life: Life, core: Scheduler) -> None:
        request = core.request(life.request.request_id)
        if request is None:
            return
        [sequence] = [s for s in request.sequences if s.index == life.index]
        self._same(f"{name}: tokens", sequence.token_ids, life.known)
        self._same(f"{name}: outputs", life.told, life.given)
        self._same(f"{name}: computed tokens", sequence.num_computed_tokens, life.num_computed)
        self._same(f"{name}: placeholders", sequence.num_placeholders, life.promised)

    def _check_tables(self, core: Scheduler) -> None:
        """Check lengths, shared blocks, reference counts, free blocks and prefixes."""
        tables = core.block_tables()
        self._same("sequences with blocks", sorted(tables), sorted(self._lives))
        owners: dict[str, list[tuple[Request, int]]] = {}
        for name, life in self._lives.items():
            table = tables.get(name, [])
            self._same(f"{name}: blocks", len(table), -(-life.num_computed // self._block_size))
            first = tables.get(f"{life.request.request_id}/0", [])
            shared = self._num_shared(life)
            self._same(f"{name}: shared blocks", table[:shared], first[:shared])
            for place, block in enumerate(table):
                owners.setdefault(block, []).append((life.request, place if place < self._num_common(life) else -1))
        for block, held in owners.items():
            if len(held) > 1 and (len(set(held)) > 1 or held[0][1] < 0):
                self._same(f"block {block}: sequences that hold it", len(held), 1)
        self._check_pool(core, Counter(block for table in tables.values() for block in table))
        if self._caching:
            self._check_prefixes(core, tables)

    def _num_common(self, life: Life) -> int:
        return (len(life.prompt) - 1) // self._block_size if life.request.n > 1 else 0

    def _check_pool(self, core: Scheduler, held: Counter[str]) -> None:
        pool = core.pool_report()
        self._same("free blocks", pool.gpu.free, pool.gpu.total - len(held))
        for block in sorted({*held, *pool.refs}):
            self._same(f"block {block}: references", pool.refs.get(block, 0), held[block])

    def _check_prefixes(self, core: Scheduler, tables: dict[str, list[str]]) -> None:
        """Check that every full block is found by its hash of all tokens up to its end.

        An older block with equal content may be found instead.
        """
        holders: dict[bytes, list[int]] = {}
        for name, life in self._lives.items():
            full = life.num_computed // self._block_size
            numbers = [int(block[1:]) for block in tables.get(name, [])[:full]]
            for block, digest in zip(numbers, self._hashes(life.known, full), strict=False):
                holders.setdefault(digest, []).append(block)
        pool = core.state.cache.ledger.gpu
        for digest, blocks in holders.items():
            found = pool.lookup(digest)
            if found not in blocks:
                self._same(f"blocks {sorted(set(blocks))}: found by their hash", found, blocks[0])

    def _hashes(self, tokens: list[int], num_blocks: int) -> list[bytes]:
        """Of each block: SHA-256 of the salt's hash and all tokens up to its end, as little-endian int32."""
        salt = hashlib.sha256(b"quire block\x000:").digest()
        ends = [(index + 1) * self._block_size for index in range(num_blocks)]
        return [hashlib.sha256(salt + struct.pack(f"<{end}i", *tokens[:end])).digest() for end in ends]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"
