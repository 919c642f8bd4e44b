"""One row's grammar: its state after the row's committed tokens, its masks and their time budget."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from protos.worker.v1 import worker_pb2
from worker_svc.sampling.grammar_cache import CompiledGrammar
from worker_svc.sampling.token_masks import Bits, MaskAsk

_FIRST_MASKS = 100
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class MaskBudget:
    """CPU time for the masks of one row: `mean_ms` each on average; the first 100 together may take 100 times that."""

    mean_ms: float = 10.0

    def is_exceeded(self, spent_ns: int, num_masks: int) -> bool:
        """True if `num_masks` masks took too long."""
        return spent_ns > self.mean_ms * _NS_PER_MS * max(_FIRST_MASKS, num_masks)


class RowGrammar:
    """Grammar state of one row after the tokens it accepted. Owns its matcher.

    `ended`: complete, with its end-of-sequence token accepted. `failed`: the RowFlag that says why it has no
    masks any more, 0 if it has some. Both are final. `last_ns`: CPU time of the last step's masks.
    """

    __slots__ = (
        "_budget", "_compiled", "_eos_ids", "_matcher", "_num_masks", "_spent_ns", "_waiting", "ended", "failed", "last_ns",
    )  # fmt: skip

    def __init__(
        self, compiled: CompiledGrammar, eos_ids: frozenset[int], output_ids: Sequence[int], budget: MaskBudget
    ) -> None:
        self._compiled: CompiledGrammar | None = compiled
        self._eos_ids = eos_ids
        self._budget = budget
        self._matcher: LLMatcher | None = None
        self._waiting = list(output_ids)
        self._spent_ns = self._num_masks = self.last_ns = 0
        self.ended = False
        self.failed = 0

    def accept(self, token_ids: Sequence[int]) -> None:
        """Queue tokens that the row commits; the matcher consumes them with the next mask."""
        self._waiting.extend(token_ids)

    def is_usable(self) -> bool:
        """True if masks can be computed. The first call waits for the compiler."""
        if self._compiled is not None:
            self._matcher, self._compiled = self._compiled.new_matcher(), None
            if self._matcher is None:
                self.failed = worker_pb2.ROW_FLAG_GRAMMAR
        return not (self.failed or self.ended)

    def fill(self, ask: MaskAsk, masks: Bits) -> None:
        """Write the masks of a usable row into its lines, which hold ones; see TokenMasks.fill."""
        began_ns = time.thread_time_ns()
        self._catch_up()
        if not (self.failed or self.ended):
            self._fill(ask, masks)
        self.last_ns = time.thread_time_ns() - began_ns
        self._spent_ns += self.last_ns
        self._num_masks += 1
        if not self.failed and self._budget.is_exceeded(self._spent_ns, self._num_masks):
            self.failed = worker_pb2.ROW_FLAG_MASK_BUDGET

    def _fill(self, ask: MaskAsk, masks: Bits) -> None:
        matcher = self._need_matcher()
        fill_next_token_bitmask(matcher, masks, ask.at)
        num_tried = 0
        for i, draft_id in enumerate(ask.draft_ids, 1):
            if matcher.is_error() or not matcher.try_consume_tokens([int(draft_id)]):
                break
            num_tried = i
            if matcher.stop_reason() == "EndOfSentence":
                break
            fill_next_token_bitmask(matcher, masks, ask.at + i)
        if num_tried:
            matcher.rollback(num_tried)
        self._check()

    def _catch_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        matcher = self._need_matcher()
        num_taken = matcher.try_consume_tokens(waiting)
        if num_taken < len(waiting):
            self._end(waiting[num_taken])
        else:
            self.ended = matcher.stop_reason() == "EndOfSentence"
        self._check()

    def _end(self, token_id: int) -> None:
        """Handle a token that the matcher refuses. After its end it refuses all, even the end-of-sequence token."""
        matcher = self._need_matcher()
        is_end = token_id in self._eos_ids and matcher.is_accepting()
        self.ended = is_end or matcher.stop_reason() == "EndOfSentence"
        if not self.ended:
            self.failed = worker_pb2.ROW_FLAG_GRAMMAR

    def _check(self) -> None:
        matcher = self._need_matcher()
        if matcher.is_error():
            is_closed = "NoExtension" in matcher.get_error()
            self.failed = worker_pb2.ROW_FLAG_GRAMMAR if is_closed else worker_pb2.ROW_FLAG_GRAMMAR_LIMIT

    def _need_matcher(self) -> LLMatcher:
        assert self._matcher is not None
        return self._matcher
