"""Token and sequence budget of one step."""

from scheduler_svc.core.reasons import Numbers


class StepBudget:
    """Tokens and sequences left in a step; discarded after it.

    Amounts are kept per request: adding twice for a request counts once, and only what was added is subtracted
    again.
    """

    __slots__ = ("_seqs", "_tokens", "max_num_seqs", "num_seqs", "num_tokens", "token_budget")

    def __init__(self, token_budget: int, max_num_seqs: int) -> None:
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.num_tokens = 0
        self.num_seqs = 0
        self._tokens: dict[str, None] = {}
        self._seqs: dict[str, None] = {}

    @property
    def num_tokens_left(self) -> int:
        """Tokens that still fit."""
        return self.token_budget - self.num_tokens

    def limit(self, num_tokens: int) -> None:
        """Lower the token budget to `num_tokens`, before any are counted."""
        self.token_budget = min(self.token_budget, num_tokens)

    @property
    def is_spent(self) -> bool:
        """True if no token fits any more."""
        return self.num_tokens >= self.token_budget

    def shortage(self, need: int = 1) -> Numbers:
        """The numbers of TOKEN_BUDGET. `need`: the fewest tokens that a share takes, counted as at least one."""
        return {"need": max(1, need), "left": self.num_tokens_left, "budget": self.token_budget}

    def take(self, num_tokens: int) -> None:
        """Use `num_tokens` without recording a request."""
        self.num_tokens += num_tokens
        assert self.num_tokens <= self.token_budget

    def give_back(self, num_tokens: int) -> None:
        """Return the tokens of a sequence that was preempted again in the same step."""
        self.num_tokens -= num_tokens

    def can_schedule(self, num_new_tokens: int, num_new_seqs: int) -> bool:
        """Whether both fit; neither may be 0."""
        assert num_new_tokens and num_new_seqs
        return (
            self.num_tokens + num_new_tokens <= self.token_budget and self.num_seqs + num_new_seqs <= self.max_num_seqs
        )

    def add_num_tokens(self, request_id: str, num_tokens: int) -> None:
        """Count a request's tokens; no-op the second time."""
        if request_id not in self._tokens:
            self._tokens[request_id] = None
            self.num_tokens += num_tokens

    def subtract_num_tokens(self, request_id: str, num_tokens: int) -> None:
        """Subtract a request's tokens if they were counted."""
        if self._tokens.pop(request_id, 0) is None:
            self.num_tokens -= num_tokens

    def add_num_seqs(self, request_id: str, num_seqs: int) -> None:
        """Count a request's sequences; no-op the second time."""
        if request_id not in self._seqs:
            self._seqs[request_id] = None
            self.num_seqs += num_seqs

    def subtract_num_seqs(self, request_id: str, num_seqs: int) -> None:
        """Subtract a request's sequences if they were counted."""
        if self._seqs.pop(request_id, 0) is None:
            self.num_seqs -= num_seqs
