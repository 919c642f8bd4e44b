import worker_svc.openmp  # noqa: F401  (before torch)
