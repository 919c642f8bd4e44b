"""Tune malloc so that large logits buffers are reused rather than returned to the OS.

Logits of 64 rows of 49,152 are 12.6 MB, 3,072 pages: each new page is a fault and is zeroed before it is
written.
"""

import ctypes
from collections.abc import Mapping

_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
# From malloc.h. Blocks above glibc's maximum for this setting are still mapped and returned.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 256 * 2**20, 32 * 2**20


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Keep up to 256 MiB of freed memory, unless `environ` sets malloc options. No-op without mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in environ for name in _CHOICES):
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
