"""What the C library does with freed memory: as a rule large pieces go back, and every step gets its logits in new pages.

Logits of 64 rows of 49,152 are 12.6 MB, 3,072 pages: each is a fault and is filled with zeros before it is written.
"""

import ctypes
from collections.abc import Mapping

_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
# Of malloc.h. Larger pieces than the most that glibc allows here are mapped and given back as ever.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 256 * 2**20, 32 * 2**20


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """The process keeps up to 256 MiB of what it frees, unless `environ` says otherwise. Nothing where there is no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in environ for name in _CHOICES):
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
