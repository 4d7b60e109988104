"""Where an option was given: to the loader, to `holdfast.install`, in the environment, or nowhere.

The loader's own value comes first, then the installed one, then the environment's
(``HOLDFAST_STALL_TIMEOUT=60``), then the default. A default is an object of its own (`DefaultText`,
`DefaultNumber`) that equals the plain value. So it can be told apart from the same value given by
the user, also after a framework has copied, pickled or passed on a loader's attributes. Where the
default is None, None means "not given".
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, cast

from holdfast import options, private_names

log = logging.getLogger("holdfast")

PREFIX: Final = "HOLDFAST_"


class DefaultText(str):
    """A default that is a text."""

    __slots__ = ()


class DefaultNumber(float):
    """A default that is a number."""

    __slots__ = ()


AUTO = cast(Literal["auto"], DefaultText("auto"))
RAISE = cast(Literal["raise"], DefaultText("raise"))
WORKER = cast(Literal["worker"], DefaultText("worker"))
MULTIPROCESSING = cast(Literal["multiprocessing"], DefaultText("multiprocessing"))
STALL_TIMEOUT: float = DefaultNumber(options.DEFAULT_STALL_TIMEOUT)

DEFAULTS: Final[Mapping[str, Any]] = {
    "max_restarts": AUTO,
    "stall_timeout": STALL_TIMEOUT,
    "on_bad_sample": RAISE,
    "max_bad_samples": None,
    "quarantine": None,
    "logbook": None,
    "memory_budget": AUTO,
    "worker_memory_limit": AUTO,
    "name": None,
    "iterable_recovery": AUTO,
    "pin_in_place": None,
    "seeding": WORKER,
    "worker_method": MULTIPROCESSING,
    "ray_options": None,
}
"""All options that holdfast adds to torch's."""

_VARIABLES = frozenset(os.fsencode(PREFIX + name.upper()) for name in DEFAULTS)
_FOR_BAD_SAMPLES = ("max_bad_samples", "quarantine")
_NOT_OPTIONS = {"FAULTS"}  # HOLDFAST_FAULTS: named points where a test makes a worker die

_installed: Mapping[str, Any] | None = None


def is_installed() -> bool:
    """Whether `holdfast.install` is in effect."""
    return _installed is not None


def install(values: Mapping[str, Any] | None) -> None:
    """From now on these are the options of loaders that have none of their own; None if nothing is
    installed any more."""
    global _installed
    _installed = values


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are no defaults."""
    return {
        name: value
        for name, value in values.items()
        if value is not DEFAULTS[name] and not isinstance(value, (DefaultText, DefaultNumber))
    }


def combine(own: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a loader, each from the first place where it was given."""
    own, installed = given(own), _installed or {}
    found = {**DEFAULTS, **from_environment(), **installed, **own}
    if found["on_bad_sample"] == "raise":
        for name in _FOR_BAD_SAMPLES:
            if name not in own and found[name] is not None:
                if name not in installed:
                    _say_it_has_no_effect(name)
                found[name] = None
    return found


def own(loader: Any) -> Mapping[str, Any]:
    """Those that a loader was given itself: only a class of ours has any."""
    find = getattr(type(loader), "_own_options", None)
    return {} if find is None else cast(Mapping[str, Any], find(loader))


def of(loader: Any) -> dict[str, Any]:
    """All options of a loader as they are now, as they were given."""
    return combine(own(loader))


def check(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check what `holdfast.install` is given, together with the environment. Returns what was given
    at all; an error names the option, its value and what it takes."""
    for name in values:
        if name not in DEFAULTS:
            near = difflib.get_close_matches(name, DEFAULTS, 1)
            raise TypeError(
                f"install() has no option {name!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(DEFAULTS)}")
            )
    mention_misspelt()
    values = given(values)
    found = {**DEFAULTS, **from_environment(), **values}
    if found["on_bad_sample"] == "raise":
        found |= {name: values.get(name) for name in _FOR_BAD_SAMPLES}
    options.parse(num_workers=1, **found)
    options.check_places(quarantine=found["quarantine"])
    return values


# -- the environment -----------------------------------------------------------------------


def from_environment(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options in the environment. A wrong one is an error that names the variable, its value
    and what would be right."""
    if environment is None:
        if not private_names.may_be_set(_VARIABLES):
            return {}
        environment = os.environ
    found = {}
    for name in DEFAULTS:
        text = environment.get(PREFIX + name.upper(), "")
        if text.strip():
            found[name] = _value(name, text.strip())
    return found


def mention_misspelt() -> None:
    """Say once in the log which variables look like an option and are none."""
    _mention_misspelt(frozenset(one for one in os.environ if one.startswith(PREFIX)))


def _value(name: str, text: str) -> Any:
    """What a text stands for, checked."""
    read = _READ.get(name, _word)
    value: Any
    try:
        value = read(text)
    except ValueError:
        value = text  # the check below says what would be right
    try:
        options.parse(num_workers=1, **_with_policy(name, value))
    except (TypeError, ValueError) as error:
        words = str(error).removeprefix(f"{name}={value!r}")
        more = _AS_TEXT.get(name, "")
        raise ValueError(f"{PREFIX}{name.upper()}={text!r}{words}{more}") from None
    return value


def _with_policy(name: str, value: Any) -> dict[str, Any]:
    """All options, so that one can be checked."""
    policy = {"on_bad_sample": "skip"} if name in _FOR_BAD_SAMPLES else {}
    if name == "ray_options":
        policy = {"worker_method": "ray"}
    return {**DEFAULTS, **policy, name: value}


def _word(text: str) -> str | None:
    return None if text.lower() == "none" else text


def _number(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        return float(text)


def _restarts(text: str) -> Any:
    if "," in text:
        return tuple(_number(one.strip()) for one in text.split(","))
    return text if text == "auto" else _number(text)


def _seeding(text: str) -> Any:
    kind, comma, seed = text.partition(",")
    return (kind.strip(), int(seed)) if comma else kind


def _bytes(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return _word(text)


def _json(text: str) -> Any:
    try:
        return None if text.lower() == "none" else json.loads(text)
    except ValueError:
        return text


_READ: dict[str, Callable[[str], Any]] = {
    "max_restarts": _restarts,
    "stall_timeout": _number,
    "max_bad_samples": _number,
    "memory_budget": _bytes,
    "worker_memory_limit": _bytes,
    "pin_in_place": _bytes,
    "seeding": _seeding,
    "ray_options": _json,
}
_AS_TEXT = {
    "ray_options": ". In the environment it is written as JSON",
    "max_restarts": ". In the environment a pair is written as 20,300, and None as none",
    "on_bad_sample": ". In the environment it cannot be a function",
    "max_bad_samples": ". In the environment None is written as none, and math.inf as inf",
    "stall_timeout": ". In the environment None is written as none",
    "memory_budget": ". In the environment None is written as none",
    "worker_memory_limit": ". In the environment None is written as none",
    "pin_in_place": ". In the environment None is written as none",
    "seeding": ". In the environment a pair is written as sample,1234",
}


@functools.cache  # once in a process
def _say_it_has_no_effect(name: str) -> None:
    log.warning(
        '%s%s has no effect where on_bad_sample is "raise", the default: the first bad sample ends '
        "the run. Set %sON_BAD_SAMPLE=skip or replace too",
        PREFIX,
        name.upper(),
        PREFIX,
    )


@functools.cache
def _mention_misspelt(variables: frozenset[str]) -> None:
    known = [PREFIX + name.upper() for name in DEFAULTS]
    for variable in sorted(variables - set(known)):
        if variable.removeprefix(PREFIX) in _NOT_OPTIONS:
            continue
        near = difflib.get_close_matches(variable, known, 1, cutoff=0.85)
        if near:
            log.warning("%s is not an option of holdfast; did you mean %s?", variable, near[0])
