"""Percentiles of measured values."""

from collections.abc import Sequence

import numpy as np


def percentiles(
    values: Sequence[float], percents: Sequence[int] = (50, 99), *, observed: bool = False
) -> dict[str, float]:
    """Percentiles by name, such as "p50", in the order of `percents`; empty without values.

    Interpolates between neighbours; with `observed`, each is the smallest value that so many percent of the
    values do not exceed.
    """
    if not len(values):
        return {}
    found = np.percentile(values, percents, method="inverted_cdf" if observed else "linear")
    return {f"p{percent}": float(value) for percent, value in zip(percents, found, strict=True)}
