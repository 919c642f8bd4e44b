"""What one step may still take."""

from scheduler_svc.core.reasons import Numbers


class StepBudget:
    """Tokens and sequences left in a step (R37, R128); thrown away after it.

    Amounts are kept per request: adding for a request twice counts once, and only what was added is taken off again (R39).
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

    @property
    def is_spent(self) -> bool:
        """No token fits any more."""
        return self.num_tokens >= self.token_budget

    def shortage(self, need: int = 1) -> Numbers:
        """The numbers of TOKEN_BUDGET. `need`: the fewest tokens that a share takes, at least one."""
        return {"need": max(1, need), "left": self.num_tokens_left, "budget": self.token_budget}

    def take(self, num_tokens: int) -> None:
        """Uses `num_tokens`, whoever it is for."""
        assert num_tokens <= self.num_tokens_left
        self.num_tokens += num_tokens

    def give_back(self, num_tokens: int) -> None:
        """A scheduled sequence was preempted again in the same step (R130)."""
        self.num_tokens -= num_tokens

    def can_schedule(self, num_new_tokens: int, num_new_seqs: int) -> bool:
        """Whether both fit; neither may be 0 (R38)."""
        assert num_new_tokens and num_new_seqs
        return (
            self.num_tokens + num_new_tokens <= self.token_budget and self.num_seqs + num_new_seqs <= self.max_num_seqs
        )

    def add_num_tokens(self, request_id: str, num_tokens: int) -> None:
        """Counts a request's tokens; the second time nothing happens."""
        if request_id not in self._tokens:
            self._tokens[request_id] = None
            self.num_tokens += num_tokens

    def subtract_num_tokens(self, request_id: str, num_tokens: int) -> None:
        """Takes them off if they were counted, and forgets the request."""
        if self._tokens.pop(request_id, 0) is None:
            self.num_tokens -= num_tokens

    def add_num_seqs(self, request_id: str, num_seqs: int) -> None:
        """Counts a request's sequences; the second time nothing happens."""
        if request_id not in self._seqs:
            self._seqs[request_id] = None
            self.num_seqs += num_seqs

    def subtract_num_seqs(self, request_id: str, num_seqs: int) -> None:
        """Takes them off if they were counted, and forgets the request."""
        if self._seqs.pop(request_id, 0) is None:
            self.num_seqs -= num_seqs
