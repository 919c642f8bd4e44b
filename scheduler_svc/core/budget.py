"""What one step may still take."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepBudget:
    """Tokens left in a step (R128); thrown away after it."""

    num_tokens_left: int

    @property
    def is_spent(self) -> bool:
        """Nothing fits any more."""
        return self.num_tokens_left <= 0

    def take(self, num_tokens: int) -> None:
        """Uses `num_tokens`."""
        assert num_tokens <= self.num_tokens_left
        self.num_tokens_left -= num_tokens

    def give_back(self, num_tokens: int) -> None:
        """A scheduled sequence was preempted again in the same step (R130)."""
        self.num_tokens_left += num_tokens
