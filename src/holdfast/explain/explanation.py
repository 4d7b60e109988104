"""Which failures of data loading a text shows, and how certain that is: the verdict on a text.

The text may be a log of hours with progress bars and colours, a traceback, an excerpt of ``dmesg``
or of ``kubectl describe``. Its messages decide. On the machine where it happened, the kernel's log
and counters support the verdict. Counters say how often the kernel killed a process, not when. Only
the log names a pid, so only the log can decide a verdict, if it contains a pid of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.autopsy.catalogue import CATALOGUE
from holdfast.autopsy.cause import Confidence, Remedy
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.machine_facts import MachineFacts, in_words
from holdfast.autopsy.readers import HERE, Roots, cgroup, kernel_log, procfs
from holdfast.autopsy.verdict import Verdict, judge, remedies_for
from holdfast.explain.clues import Clues, Finding


@dataclass(frozen=True)
class Scene:
    """The machine where it happened, read some time later."""

    machine: MachineFacts
    kernel: kernel_log.KernelLog | None = None
    group_kills: int | None = None
    machine_kills: int | None = None

    @classmethod
    def read(cls, roots: Roots = HERE) -> Scene:
        kills = cgroup.kills("self", roots)
        return cls(
            MachineFacts.read(roots),
            kernel_log.read(roots, commands=roots is HERE),
            None if kills is None else max(kills.values()),
            procfs.machine_kills(roots),
        )


COLLECT = (
    Remedy("All of standard error, from its beginning", "python train.py 2>&1 | tee train.log"),
    Remedy("The exit status of the trainer", "echo $?"),
    Remedy("The end of the kernel's log", "sudo dmesg -T | tail -100"),
    Remedy("Room in shared memory and the limits", "df -h /dev/shm; ulimit -a; free -h"),
    Remedy(
        "If it hangs: the stacks of trainer and workers", "py-spy dump --pid PID --subprocesses"
    ),
    Remedy("Or one run with a logbook", "holdfast.DataLoader(..., logbook='runs/today')"),
)
"""What to collect when nothing is known."""

REBUILT = "accelerate-rebuild"
_UNEXPLAINED = {"killed-unexplained", "exited-unexpectedly"}
_PLENTY_OF_SHM = 4 << 30  # free bytes of /dev/shm that are hardly ever used up


@dataclass(frozen=True)
class Explanation:
    """What was found in a text, the likeliest first; empty if no cause was found."""

    verdicts: tuple[Verdict, ...]
    lines: int
    messages: int  # how many patterns were searched for
    blank: bool = False
    ending: str = ""
    """The error that the text ends with, if no cause matches it; the verdicts are then about errors
    before it, or about other processes."""
    rebuilt: bool = False
    """Whether Accelerate used torch's own loader, so that holdfast was not involved."""

    @property
    def known(self) -> bool:
        return bool(self.verdicts) and not self.ending


def conclude(clues: Clues, scene: Scene | None) -> Explanation:
    """The verdicts on the clues of one or several texts. `scene` is the machine where it happened,
    if that is known."""
    findings = clues.findings()
    other = clues.ending() if all(finding.aside for finding in findings) else None
    ending = ""
    if other is not None:
        source, last = other
        file = f" of {source}" if source else ""
        ending = f"line {last.line}{file}: {last.text[:200]}"
    verdicts = [_verdict(finding, clues.workers, scene) for finding in findings]
    rebuilt = bool(clues.rebuilt and findings and not findings[0].aside)
    if rebuilt:
        verdicts[0] = _of_torchs_loader(verdicts[0], clues.rebuilt)
    return Explanation(
        tuple(verdicts),
        clues.lines,
        sum(len(cause.signs) for cause in CATALOGUE.values()),
        clues.blank,
        ending,
        rebuilt,
    )


def _of_torchs_loader(verdict: Verdict, where: str) -> Verdict:
    """The verdict on a worker of the loader that Accelerate had made."""
    if verdict.cause == REBUILT:
        return verdict
    said = (
        f"{where} shows Accelerate iterating torch's own loader. prepare() makes one of any "
        "loader it is given, a holdfast one too: the workers were torch's, so none was replaced, "
        f"and the run ended (holdfast explain {REBUILT})"
    )
    back = CATALOGUE[REBUILT].remedies[0]
    return replace(verdict, because=(*verdict.because, said), remedies=(*verdict.remedies, back))


def _verdict(finding: Finding, pids: Sequence[int], scene: Scene | None) -> Verdict:
    machine = None if scene is None else scene.machine
    verdict = judge(Evidence(findings=(finding,), pid=pids[0] if pids else None), machine)
    if scene is None:
        return verdict
    if finding.slug in _UNEXPLAINED and not finding.aside:
        return _ask_kernel(verdict, pids, scene)
    if finding.slug == "shm-exhausted" and finding.confidence != "high":
        return _ask_shm(verdict, scene)
    return verdict


def _ask_kernel(verdict: Verdict, pids: Sequence[int], scene: Scene) -> Verdict:
    lines = () if scene.kernel is None else scene.kernel.lines
    known = verdict.cause == "killed-unexplained"  # that it was SIGKILL
    for pid in pids:
        for line in reversed(kernel_log.about(pid, lines)):
            why = f"this machine's kernel log says: {line}"
            if re.search(r"[Kk]ill(ed)? process|oom-kill", line):
                return _instead(verdict, scene, "oom-killed", "high" if known else "medium", why)
            if not known:  # pids are reused; the line may be about an earlier process
                return _instead(verdict, scene, "native-segv", "medium", why)
    if scene.kernel is not None and pids:
        also = f"this machine's kernel log ({scene.kernel.source}) has no line about pid {pids[0]}"
        verdict = replace(verdict, because=(*verdict.because, also))
    count = scene.group_kills or scene.machine_kills
    if count:
        where = "in this control group" if scene.group_kills else "on this machine"
        also = (
            f"kills for memory that the kernel has counted {where}: {count}; whether this worker "
            "was one of them is not known"
        )
        return replace(verdict, because=(*verdict.because, also))
    if scene.group_kills == 0 and scene.machine_kills == 0:
        also = (
            "this machine's kernel has killed no process for memory since it started: if it "
            "happened here, it was not memory"
        )
        return replace(verdict, because=(*verdict.because, also))
    return verdict


def _ask_shm(verdict: Verdict, scene: Scene) -> Verdict:
    shm = scene.machine.shm
    if shm is None:
        return verdict
    size = f"/dev/shm here has {in_words(shm.free)} free of {in_words(shm.total)}"
    if shm.free >= _PLENTY_OF_SHM:
        doubt = (
            size + ": if it happened on this machine, a mapped file is likelier than shared memory"
        )
        return replace(
            verdict,
            confidence="low",
            because=(*verdict.because, doubt),
            perhaps=("sigbus-not-shm",),
        )
    return replace(verdict, because=(*verdict.because, size))


def _instead(
    verdict: Verdict, scene: Scene, slug: str, confidence: Confidence, why: str
) -> Verdict:
    because = (*verdict.because, why)
    return Verdict(slug, confidence, verdict.sample, because, remedies_for(slug, scene.machine))
