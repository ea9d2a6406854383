"""Large tensors without page faults: glibc reuses the memory of freed tensors.

By default glibc maps memory for each block above 32 MB, and unmaps it when the block is freed. The logits of 30,000
pieces are 150 MB. Each training step then waits until the kernel has cleared that memory, for a fifth of its time.
"""

import ctypes
import os

# constants of malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
LARGEST_KEPT = 1 << 30  # bytes; larger blocks still go back to the kernel at once
NEVER = -1  # give the free end of the heap back


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks of up to 1 GiB until this process ends; True if glibc now does.

    The process then keeps the largest amount of memory that it ever used. Nothing changes if the user has decided
    (``MALLOC_*``, ``GLIBC_TUNABLES``), with another allocator (such as jemalloc in ``LD_PRELOAD``), or without glibc.
    """
    if _user_has_chosen() or not _allocates_with_glibc():
        return False
    libc = ctypes.CDLL(None)
    # before glibc 2.35 the threshold cannot be above 32 MB, but mapping can be switched off
    keeps = libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) == 1 or libc.mallopt(M_MMAP_MAX, 0) == 1
    return keeps and libc.mallopt(M_TRIM_THRESHOLD, NEVER) == 1


def _user_has_chosen() -> bool:
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )


def _allocates_with_glibc() -> bool:
    """Whether this process uses glibc's ``malloc``."""
    try:
        is_glibc = str(os.confstr("CS_GNU_LIBC_VERSION")).startswith("glibc")
        libc = ctypes.CDLL("libc.so.6")
    except (OSError, ValueError, AttributeError):  # musl, macOS, Windows
        return False
    called = ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p)
    return is_glibc and called.value == ctypes.cast(libc.malloc, ctypes.c_void_p).value
