"""Cost of work on the worker as the scheduler knows it: an input like any other, so that a recording replays it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds; 0 = unknown.

    `step_s`: minimum duration of a step. `compute_token_s`: added by each further token. `swap_block_s`: added
    by each block copied to or from the host.
    """

    step_s: float = 0.0
    compute_token_s: float = 0.0
    swap_block_s: float = 0.0

    @property
    def are_known(self) -> bool:
        """True if the costs of computing and copying can be compared."""
        return self.compute_token_s > 0 and self.swap_block_s > 0

    def swap_s(self, num_blocks: int) -> float:
        """Time to copy blocks to the host and back."""
        return 2 * num_blocks * self.swap_block_s

    def tokens_in(self, seconds: float) -> int:
        """Tokens that a worker could have computed in that time; 0 while the cost of a token is unknown."""
        token_s = self.compute_token_s or self.step_s
        return int(seconds / token_s) if token_s else 0

    def compute_s(self, num_tokens: int) -> float:
        """Time that so many more tokens add to steps that run anyway."""
        return num_tokens * self.compute_token_s


class CostBook:
    """Owner of the current costs: those the operator configured, then measured ones."""

    def __init__(self, initial: Costs | None = None) -> None:
        self.now = initial or Costs()

    def observe(self, costs: Costs) -> None:
        """Replace costs by new measurements; unknown ones stay as they were."""
        self.now = Costs(
            step_s=costs.step_s or self.now.step_s,
            compute_token_s=costs.compute_token_s or self.now.compute_token_s,
            swap_block_s=costs.swap_block_s or self.now.swap_block_s,
        )
