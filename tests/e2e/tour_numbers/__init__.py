"""The numbers of the tour's screens, recomputed from the steps alone: what `quire tour --steps` wrote, read back as plain text.

Nothing here uses code of `quire_tools.tour`. `RECOMPUTED`: by stop, a function from the steps of its stacks and the screen's own
numbers (for those that say which moment is meant) to numbers as the screen prints them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.e2e.tour_numbers import batches, blocks, policies, starts

Steps = Sequence[Mapping[str, Any]]
Recompute = Callable[[Sequence[Steps], Mapping[str, str]], Mapping[str, str]]

RECOMPUTED: dict[str, Recompute] = {
    **batches.RECOMPUTED,
    **blocks.RECOMPUTED,
    **policies.RECOMPUTED,
    **starts.RECOMPUTED,
}
