"""The facts that the checks of the machine judge, read once; tests pass their own roots."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from holdfast import kernel
from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.readers import HERE, Roots, cgroup, kernel_log, procfs, text

if TYPE_CHECKING:
    from holdfast.private_names import Part


@dataclass(frozen=True)
class Surroundings:
    """The machine, and the Python we run in. None means unknown."""

    machine: MachineFacts
    confined: cgroup.Confinement
    environment: Mapping[str, str]
    cores: int  # that this process may run on, whatever its quota
    commit: tuple[int, int] | None = None  # bytes committed, and the limit
    kernel_log: str | None = None  # the source it can be read from
    threads: int = 1
    thread_names: tuple[str, ...] = ()
    start_method: str = "fork"
    python: tuple[int, ...] = sys.version_info[:3]
    free_threaded: bool = False
    torch: str | None = None
    numpy: str | None = None
    sharing: str | None = None  # torch's strategy
    openmp: tuple[str, ...] = ()  # OpenMP libraries in this process
    opencv: int | None = None  # threads it would use; None: not installed
    opencv_loaded: bool = False
    container: str = ""  # what kind of container this is; "" for none
    private_names: tuple[Part, ...] = ()  # empty if torch is not installed
    kernel: Mapping[str, kernel.Feature] = field(default_factory=dict)  # by name, as found here

    @classmethod
    def read(
        cls, roots: Roots = HERE, environment: Mapping[str, str] | None = None
    ) -> Surroundings:
        known = os.environ if environment is None else environment
        seen = MachineFacts.read(roots, known)
        log = kernel_log.read(roots, commands=roots == HERE)
        return cls(
            machine=seen,
            confined=cgroup.confinement("self", roots),
            environment=known,
            cores=kernel.cores(),
            commit=_commit(roots),
            kernel_log=None if log is None else log.source,
            threads=procfs.threads("self", roots) or 1,
            thread_names=tuple(
                thread.name
                for thread in threading.enumerate()
                if thread is not threading.main_thread()
            ),
            start_method=multiprocessing.get_start_method(allow_none=True) or _default_method(),
            free_threaded=not getattr(sys, "_is_gil_enabled", lambda: True)(),
            torch=_version("torch"),
            numpy=_version("numpy"),
            sharing=_sharing(),
            private_names=_private_names(),
            openmp=_openmp(roots),
            opencv=_opencv(),
            opencv_loaded="cv2" in sys.modules,
            container=_container(seen.place, known, roots),
            kernel={one.name: one for one in kernel.survey()},
        )


def _default_method() -> str:
    return multiprocessing.get_all_start_methods()[0]


def _commit(roots: Roots) -> tuple[int, int] | None:
    written = text(roots.proc / "meminfo") or ""
    fields = dict(re.findall(r"^(Committed_AS|CommitLimit):\s+(\d+) kB", written, re.MULTILINE))
    if len(fields) < 2:
        return None
    return int(fields["Committed_AS"]) << 10, int(fields["CommitLimit"]) << 10


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sharing() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch.multiprocessing

    return str(torch.multiprocessing.get_sharing_strategy())  # type: ignore[no-untyped-call]


def _private_names() -> tuple[Part, ...]:
    if importlib.util.find_spec("torch") is None:
        return ()
    from holdfast.private_names import PARTS

    return tuple(PARTS)


def _openmp(roots: Roots) -> tuple[str, ...]:
    maps = text(roots.proc / "self" / "maps") or ""
    return tuple(sorted(set(re.findall(r"lib(?:gomp|iomp5|omp)[-\w]*\.so[.\d]*", maps))))


def _opencv() -> int | None:
    if "cv2" in sys.modules:
        return int(sys.modules["cv2"].getNumThreads())
    if importlib.util.find_spec("cv2") is not None:
        return os.cpu_count() or 1
    return None


def _container(place: str, environment: Mapping[str, str], roots: Roots) -> str:
    if place in ("docker", "kubernetes"):
        return place
    if os.path.exists(roots.proc / "self" / "root" / "run" / ".containerenv"):
        return "podman"
    for variable in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        if variable in environment:
            return "apptainer"
    return environment.get("container", "")  # set by systemd, LXC and others
