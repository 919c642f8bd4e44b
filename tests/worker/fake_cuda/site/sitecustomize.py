"""Imported by Python when it starts. A worker (`python -m quire serve worker`) gets the fake device."""

import sys

if "worker" in sys.orig_argv:
    import worker_svc.openmp  # noqa: F401  (before anything that imports torch)
    from tests.worker.fake_cuda.process import take_over

    take_over()
