"""Why native code crashed: from the signal, the stack, /dev/shm and what was printed."""

from __future__ import annotations

import re

from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.machine_facts import in_words
from holdfast.autopsy.verdict.draft import Verdict, end_of, verdict, where
from holdfast.explain.clues import find

_SMALL_SHM = 256 << 20  # bytes: a container's default /dev/shm, and a little more
_MAPPED = re.compile(r"memmap|lmdb|mmap|safetensors|pyarrow|hdf5|h5py", re.IGNORECASE)
_CRASHES = {"SIGSEGV": "native-segv", "SIGFPE": "native-segv", "SIGILL": "illegal-instruction"}
_RECURSION = 20
_BY_THE_STACK = 64 << 10  # bytes


def bus_error(e: Evidence) -> Verdict | None:
    if e.signal != "SIGBUS":
        return None
    shm = e.shm
    mapped = next((line.strip() for line in e.stack.splitlines() if _MAPPED.search(line)), "")
    if shm is None:
        likely, other = ("sigbus-not-shm", "shm-exhausted")[:: 1 if mapped else -1]
        return verdict(likely, "low", "SIGBUS; /dev/shm could not be looked at", perhaps=(other,))
    said = f"/dev/shm has {in_words(shm.free)} free of {in_words(shm.total)}"
    if shm.nearly_full:
        return verdict(
            "shm-exhausted",
            "high" if not mapped else "medium",
            "SIGBUS",
            said,
            *where(e.stack),
            perhaps=("sigbus-not-shm",) if mapped else (),
        )
    if shm.total <= _SMALL_SHM and not mapped:
        return verdict(
            "shm-exhausted",
            "low",
            "SIGBUS",
            said + " now, but what the worker had there was freed when it died",
            perhaps=("sigbus-not-shm",),
        )
    reasons = ["SIGBUS", said + ", so shared memory was not the reason"]
    reasons += [f"its stack is in {mapped}"] if mapped else where(e.stack)
    return verdict(
        "sigbus-not-shm",
        "high" if mapped else "medium",
        *reasons,
        perhaps=() if mapped else ("shm-exhausted",),
    )


def abort(e: Evidence) -> Verdict | None:
    if e.signal != "SIGABRT" or e.sent_by_us:
        return None
    said = "SIGABRT that holdfast did not send"
    if e.stderr is None:
        silent = "what it wrote to standard error was not kept: look for it there"
        return verdict("abort", "medium", said, silent, perhaps=("allocation-failed",))
    for finding in find(end_of(e.stderr)):
        if finding.slug in ("allocation-failed", "file-system-strategy", "shm-exhausted"):
            return verdict(
                finding.slug,
                "medium",
                said,
                f"standard error says: {finding.text}",
                perhaps=("abort",),
            )
        if finding.slug == "abort":
            words = f"standard error says: {finding.text}"
            return verdict("abort", "high", said, words, *where(e.stack))
    return verdict("abort", "high", said, *where(e.stack))


def crash(e: Evidence) -> Verdict | None:
    slug = _CRASHES.get(e.signal or "")
    if slug is None:
        return None
    said = [f"it died of {e.signal}"]
    said += [f"the kernel's log says: {line}" for line in e.kernel_lines[-1:]]
    if e.signal == "SIGSEGV":
        frame, count = _repeated(e.stack)
        if count >= _RECURSION:
            return verdict(
                "stack-overflow",
                "medium",
                *said,
                f"one frame is {count} times in its stack: {frame}",
                perhaps=("native-segv",),
            )
        near = _fault_by_the_stack(e.kernel_lines)
        if near is not None or (not e.stack and e.handlers and not e.kernel_lines):
            return verdict(
                "stack-overflow",
                "medium",
                *said,
                near
                or "it left no stack although its signal handlers were installed: they could not "
                "run, as when a thread's stack overflows",
                perhaps=("native-segv",),
            )
        if not e.stack:
            missing = e.handlers is False
            return verdict(
                "native-segv",
                "medium",
                *said,
                "it left no stack"
                + (": something had replaced the handler that writes it" if missing else ""),
                perhaps=("stack-overflow",),
            )
    return verdict(slug, "high", *said, *where(e.stack))


def _fault_by_the_stack(lines: tuple[str, ...]) -> str | None:
    """What the kernel's log says of a fault at the end of a stack."""
    for line in lines:
        match = re.search(r"segfault at ([0-9a-f]+) ip \S+ sp ([0-9a-f]+)", line)
        if match and abs(int(match[1], 16) - int(match[2], 16)) < _BY_THE_STACK:
            return "the address of the fault is close to its stack pointer"
    return None


def _repeated(stack: str) -> tuple[str, int]:
    frames = [line.strip() for line in stack.splitlines() if line.startswith("  File")]
    best = max(frames, key=frames.count, default="")
    return best, frames.count(best)
