"""The backend "cuda": kernels in Triton, and products by torch."""
