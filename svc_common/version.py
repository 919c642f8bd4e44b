"""Release of this build, and the revisions of the internal protocol that it speaks.

A change that a process of the revision before would misread makes a new revision: the sender does it only where the agreed
revision has it, and what the change replaces goes one revision later.
"""

from dataclasses import dataclass

VERSION = "0.1.0"


@dataclass(frozen=True, slots=True)
class Revisions:
    """Revisions that a process speaks, both included."""

    oldest: int
    newest: int

    def agreed(self, other: "Revisions") -> int | None:
        """The newest that both speak, whichever of them asks; None if there is none."""
        revision = min(self.newest, other.newest)
        return revision if revision >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


SPOKEN = Revisions(3, 3)
"""By this build: the present one, and the one before where it can."""
