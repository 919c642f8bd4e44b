"""Seeds of tests that are parametrized with them."""

from typing import Any

import pytest


def seeds(num: int, whole: int) -> list[Any]:
    """Parameters 0 to `whole` - 1; those from `num` on are of the long tier."""
    return [pytest.param(seed, marks=pytest.mark.long if seed >= num else ()) for seed in range(whole)]
