"""Post-processing of embedding vectors. Pure; also used in process by `quire.LLM`."""

import numpy as np

from svc_common.wire_arrays import Array


def as_asked(values: Array, *, normalize: bool) -> Array:
    """Return float32 `values`, with `normalize` scaled to length 1 (computed in float64); a zero vector stays zero."""
    if not normalize:
        return values
    length = float(np.linalg.norm(values.astype(np.float64)))
    return values / np.float32(length) if length else values
