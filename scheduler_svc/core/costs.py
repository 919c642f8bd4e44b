"""What work costs on the worker, as the scheduler knows it: an input like any other, so that a recording replays it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds; 0 = not known. `step_s`: the least that any step takes. `compute_token_s`: what one more token adds to a step.
    `swap_block_s`: what one block adds that is copied to the host or back.
    """

    step_s: float = 0.0
    compute_token_s: float = 0.0
    swap_block_s: float = 0.0

    @property
    def are_known(self) -> bool:
        """Whether computing and copying can be compared."""
        return self.compute_token_s > 0 and self.swap_block_s > 0

    def swap_s(self, num_blocks: int) -> float:
        """To the host and back."""
        return 2 * num_blocks * self.swap_block_s

    def tokens_in(self, seconds: float) -> int:
        """Tokens that a worker could have computed in that time; 0 while it is not known what one takes."""
        token_s = self.compute_token_s or self.step_s
        return int(seconds / token_s) if token_s else 0

    def compute_s(self, num_tokens: int) -> float:
        """Computing so many tokens in steps that run anyway."""
        return num_tokens * self.compute_token_s


class CostBook:
    """Owner of the costs that count now: the operator's first, then what was measured."""

    def __init__(self, initial: Costs | None = None) -> None:
        self.now = initial or Costs()

    def observe(self, costs: Costs) -> None:
        """New measurements; what they do not know stays as it was."""
        self.now = Costs(
            step_s=costs.step_s or self.now.step_s,
            compute_token_s=costs.compute_token_s or self.now.compute_token_s,
            swap_block_s=costs.swap_block_s or self.now.swap_block_s,
        )
