"""Progress: when tokens count as computed."""

from scheduler_svc.core.request import Sequence


class AtSchedule:
    """As soon as a step is planned, before it runs (R127, R135)."""

    def num_pending(self, sequence: Sequence) -> int:
        """Known tokens less computed ones."""
        return sequence.num_tokens - sequence.num_computed_tokens

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts them."""
        sequence.num_computed_tokens += num_tokens
