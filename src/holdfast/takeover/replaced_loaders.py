"""Loaders that Accelerate makes in place of ours: they are ours again, with the same options.

``accelerator.prepare`` makes a torch loader of every loader it is given, also for the Hugging Face
Trainer, and ``skip_first_batches`` makes another one. Both take the dataset and the samplers of the
old loader, and leave out what its class adds. They make it by calling the name ``DataLoader`` in
their module, ``accelerate.data_loader``. `keep_class` puts `LoaderOfAccelerate` there. Called, it
looks in the frames of Accelerate that lead to it for the loader that is being replaced. If that is
one of ours, the new one is ours too; otherwise it is what it would have been.

That is done when a loader of ours is made, if Accelerate is imported by then, and when Accelerate
asks one whether it ``_is_accelerate_prepared``, which is the first thing that it does with it.

With ``use_stateful_dataloader=True`` Accelerate makes a loader of torchdata's instead. One of ours
has the same methods. So it is made as without that option, and then marked as stateful, by which
``save_state`` and ``load_state`` know that it has a state (`_keep_stateful`).
"""

from __future__ import annotations

import functools
import logging
import sys
from types import FrameType
from typing import Any

import torch.utils.data

from holdfast import option_sources
from holdfast.loader_identity import LoaderIdentity, name_of
from holdfast.loader_identity import rank as find_rank

log = logging.getLogger("holdfast")

_MODULE = "accelerate.data_loader"
_said: list[bool] = []


class _CalledByAccelerate(type):
    """It stands for torch's class in all respects but one: which class is made."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        replaced = _replaced(sys._getframe(1))
        if replaced is None:
            return cls.torchs(*args, **kwargs)  # type: ignore[attr-defined]
        return replaced._made_anew(*args, **kwargs)

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, cls.torchs)  # type: ignore[attr-defined]

    def __subclasscheck__(cls, one: type) -> bool:
        return issubclass(one, cls.torchs)  # type: ignore[attr-defined]


class LoaderOfAccelerate(metaclass=_CalledByAccelerate):
    """What Accelerate calls to make a loader."""

    torchs: Any = torch.utils.data.DataLoader  # what was there before


class AskedByAccelerate:
    """``_is_accelerate_prepared`` of a loader: False, until Accelerate sets it itself."""

    def __get__(self, loader: Any, kind: type) -> bool:
        asks = sys._getframe(1)
        if loader is not None and _top_package(asks) == "accelerate" and not keep_class():
            _say_it_is_lost(loader)
        return False


def keep_class() -> bool:
    """See to it that loaders that Accelerate makes of ours are ours. False if that is not possible
    with this version of it; True also if it is not imported."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return True
    there = getattr(module, "DataLoader", None)
    if there is None:
        return False
    if there is not LoaderOfAccelerate:
        LoaderOfAccelerate.torchs = there
        module.DataLoader = LoaderOfAccelerate  # type: ignore[attr-defined]
    _keep_stateful(getattr(module, "DataLoaderAdapter", None))
    return True


def _keep_stateful(adapter: Any) -> None:
    """Let Accelerate's adapters make a loader of ours also where they would make torchdata's."""
    torchdatas = getattr(adapter, "__init__", None)
    if torchdatas is None or hasattr(torchdatas, "__wrapped__"):
        return

    @functools.wraps(torchdatas)
    def init(
        self: Any, dataset: Any, use_stateful_dataloader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        ours = use_stateful_dataloader and _replaced(sys._getframe(1)) is not None
        torchdatas(self, dataset, use_stateful_dataloader and not ours, *args, **kwargs)
        if ours:
            self.use_stateful_dataloader = True

    adapter.__init__ = init


def _replaced(frame: FrameType | None) -> Any:
    """The loader of ours that Accelerate is making another of; None if it is not one of ours."""
    while frame is not None and frame.f_globals.get("__name__") in (_MODULE, __name__):
        # prepare_data_loader(loader, ...) and skip_first_batches(loader, ...)
        given = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        inner = getattr(given, "__dict__", {}).get("base_dataloader", given)
        if hasattr(type(inner), "_made_anew"):
            return inner
        frame = frame.f_back
    return None


def _top_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _say_it_is_lost(loader: Any) -> None:
    if option_sources.is_installed() or _said:
        return  # with `install` the new loader says it itself, if it is so
    _said.append(True)
    rank = find_rank()
    log.warning(
        "%sAccelerate replaces this holdfast loader by torch's own: workers are not replaced when "
        "they die or hang, and options such as on_bad_sample have no effect. holdfast.install() at "
        "the beginning of the program gives the new loader holdfast's engine too, with the options "
        "of install()",
        LoaderIdentity(loader.name or name_of(loader.dataset), rank.told).prefix,
    )
