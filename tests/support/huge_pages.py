"""Makes forking this process cheap, for tests that fork it a thousand times.

A fork copies a page table entry for each page of 4 KiB, and the child's end removes them again: 40,000 of them after
`import torch`, which took most of the time of a loader of two workers. What the imports have left is therefore moved to
pages of 2 MiB, once. Memory that is allocated later, here or in a child, is as it always is.

Where the kernel does not know how (before Linux 6.1), tests take longer and nothing else changes.
"""

from __future__ import annotations

import ctypes

HUGE = 2 << 20
_MADV_COLLAPSE = 25


def move_to_huge_pages() -> int:
    """Moves the private memory that has no holes; how many huge pages came of it."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    moved = 0
    for span, mode, *_, name in ([*fields, ""][:6] for fields in mappings):
        if mode != "rw-p" or name not in ("", "[heap]"):
            continue
        begin, end = (int(part, 16) for part in span.split("-"))
        for start in range(-(-begin // HUGE) * HUGE, end - HUGE + 1, HUGE):
            moved += libc.madvise(start, HUGE, _MADV_COLLAPSE) == 0
    return moved
