"""Vectors as clients asked for them. Pure; also used in process by `quire.LLM`."""

import numpy as np

from svc_common.wire_arrays import Array


def as_asked(values: Array, *, normalize: bool) -> Array:
    """float32 `values`, scaled to length 1 where that is wanted (computed in float64); a vector of zeros stays one."""
    if not normalize:
        return values
    length = float(np.linalg.norm(values.astype(np.float64)))
    return values / np.float32(length) if length else values
