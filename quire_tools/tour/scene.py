"""A part of a screen: one of several things that a stop shows on the same stack."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from quire_tools.tour.screen import Check, Number


@dataclass(frozen=True, slots=True)
class Scene:
    """A heading, a picture, numbers read from the stack, and checks on them."""

    heading: str
    picture: RenderableType
    numbers: Sequence[Number]
    checks: Sequence[Check]
