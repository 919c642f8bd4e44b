"""Worker groups of several ranks: processes that run every step together, each on a part of the weights."""

import worker_svc.openmp  # noqa: F401  (before anything that imports torch)
