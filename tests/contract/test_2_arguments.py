"""contract.md section 2: which arguments are refused, as what, in which words, and when."""

from __future__ import annotations

import gc
import os
import re
import traceback
import warnings
from typing import Any

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.support.datasets import Numbers, Stream, plain_pipe
from tests.support.loaders import STOCK, Loader
from tests.support.processes import children

pytestmark = pytest.mark.timeout(60)

MAP = Numbers(5)
ITERABLE = Stream(5)

AT_CONSTRUCTION: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
    (ValueError, "num_workers option should be non-negative", MAP, {"num_workers": -1}),
    (ValueError, "timeout option should be non-negative", MAP, {"timeout": -1}),
    (
        ValueError,
        "batch_size=None option disables auto-batching and is mutually exclusive",
        MAP,
        {"batch_size": None, "drop_last": True},
    ),
    (
        ValueError,
        r"multi-process loading \(num_workers > 0\), but got",
        MAP,
        {"multiprocessing_context": "fork"},
    ),
    (
        ValueError,
        "should specify a valid start method in",
        MAP,
        {"num_workers": 1, "multiprocessing_context": "bad"},
    ),
    (
        TypeError,
        "multiprocessing_context option should be a valid context",
        MAP,
        {"num_workers": 1, "multiprocessing_context": object},
    ),
    (
        ValueError,
        "sampler option is mutually exclusive with shuffle",
        MAP,
        {"sampler": [0], "shuffle": True},
    ),
    (
        ValueError,
        "sampler option is mutually exclusive with shuffle",
        MAP,
        {"sampler": [0], "shuffle": 3},
    ),
    (
        ValueError,
        "sampler option is mutually exclusive with shuffle",
        MAP,
        {"sampler": [0], "shuffle": True, "batch_sampler": [[0]]},
    ),
    *(
        (
            ValueError,
            "batch_sampler option is mutually exclusive with",
            MAP,
            {"batch_sampler": [[0]], **other},
        )
        for other in (
            {"batch_size": 2},
            {"batch_size": None},
            {"shuffle": True},
            {"sampler": [0]},
            {"drop_last": True},
            {"drop_last": 3},
        )
    ),
    *(
        (
            ValueError,
            f"DataLoader with IterableDataset: expected unspecified {name} option",
            ITERABLE,
            {name: value},
        )
        for name, value in (
            ("shuffle", True),
            ("shuffle", 3),
            ("sampler", [0]),
            ("sampler", Numbers(3)),
            ("batch_sampler", [[0]]),
        )
    ),
    (
        ValueError,
        "prefetch_factor option could only be specified in multiprocessing",
        MAP,
        {"prefetch_factor": 2},
    ),
    (
        ValueError,
        "prefetch_factor option should be non-negative",
        MAP,
        {"num_workers": 1, "prefetch_factor": -1},
    ),
    (
        ValueError,
        "persistent_workers option needs num_workers > 0",
        MAP,
        {"persistent_workers": True},
    ),
    (ValueError, "batch_size should be a positive integer", MAP, {"batch_size": 0}),
    (ValueError, "batch_size should be a positive integer", MAP, {"batch_size": -2}),
    (ValueError, "drop_last should be a boolean", MAP, {"drop_last": "yes"}),
    (ValueError, "num_samples should be a positive integer", Numbers(0), {"shuffle": True}),
]


def short(each: object) -> str:
    """Of a test's parameter: the same in every run."""
    return re.sub(r" object at 0x[0-9a-f]+|tests\.support\.datasets\.", "", str(each))[:60]


@pytest.mark.parametrize(("kind", "wording", "dataset", "arguments"), AT_CONSTRUCTION, ids=short)
def test_wrong_arguments_are_refused_at_construction_in_torchs_words(
    loader_class: Loader,
    kind: type[Exception],
    wording: str,
    dataset: Any,
    arguments: dict[str, Any],
) -> None:
    with pytest.raises(kind, match=wording) as refused:
        loader_class(dataset, **arguments)
    with pytest.raises(kind) as torchs:
        STOCK(dataset, **arguments)
    assert str(refused.value) == str(torchs.value)
    assert type(refused.value) is type(torchs.value)


@pytest.mark.parametrize(
    ("dataset", "arguments", "winner"),
    [
        (MAP, {"num_workers": -1, "timeout": -1}, "num_workers option"),
        (MAP, {"timeout": -1, "prefetch_factor": 3}, "timeout option"),
        (MAP, {"prefetch_factor": 3, "persistent_workers": True}, "prefetch_factor option"),
        (
            MAP,
            {"persistent_workers": True, "multiprocessing_context": "fork"},
            "persistent_workers option",
        ),
        (
            MAP,
            {"multiprocessing_context": "fork", "sampler": [0], "shuffle": True},
            "multiprocessing_context can only",
        ),
        (
            ITERABLE,
            {"shuffle": True, "sampler": [0], "batch_sampler": [[0]]},
            "unspecified shuffle",
        ),
        (ITERABLE, {"sampler": [0], "batch_sampler": [[0]]}, "unspecified sampler"),
        (ITERABLE, {"batch_sampler": [[0]], "batch_size": 5}, "unspecified batch_sampler"),
        (
            MAP,
            {"batch_sampler": [[0]], "batch_size": None, "drop_last": True},
            "batch_sampler option",
        ),
    ],
)
def test_of_several_wrong_arguments_the_same_one_is_named(
    loader_class: Loader, dataset: Any, arguments: dict[str, Any], winner: str
) -> None:
    with pytest.raises(ValueError, match=winner):
        loader_class(dataset, **arguments)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("arguments"),
    [{"timeout": 5}, {"num_workers": 1, "prefetch_factor": 0}],
    ids=short,
)
def test_some_arguments_are_refused_only_by_iter(
    loader_class: Loader, arguments: dict[str, Any]
) -> None:
    refused, torchs = (refused_by_iter(one(MAP, **arguments)) for one in (loader_class, STOCK))
    assert refused == torchs
    gc.collect()  # what finalisers have to say is said now


def refused_by_iter(loader: Any) -> str:
    """In which words. torch's half-made iterator is given what its finaliser asks for, which would
    else complain of an attribute that is missing; ours has to do without."""
    with pytest.raises(AssertionError) as refused:
        list(loader)
    for frame, _ in traceback.walk_tb(refused.tb):
        made = frame.f_locals.get("self")
        if type(made) is _MultiProcessingDataLoaderIter:
            made._shutdown = True
    return str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sampler": [0], "shuffle": False},
        {"batch_sampler": [[0]], "shuffle": False, "drop_last": False, "batch_size": 1},
        {"num_workers": 1, "multiprocessing_context": None},
        {"persistent_workers": False, "prefetch_factor": None},
        {"drop_last": False, "batch_size": None},
    ],
    ids=short,
)
def test_spelled_out_defaults_are_no_conflict(
    loader_class: Loader, arguments: dict[str, Any]
) -> None:
    assert int(next(iter(loader_class(MAP, **arguments)))) == 0


def test_iterables_accept_shuffle_false_and_datapipes_any(loader_class: Loader) -> None:
    assert len(list(loader_class(Stream(3), shuffle=False))) == 3
    for shuffle in (True, False, None):
        assert len(list(loader_class(plain_pipe(3), shuffle=shuffle))) == 3


def test_more_workers_than_cores_warns_at_construction_without_starting_any(
    loader_class: Loader,
) -> None:
    usable = len(os.sched_getaffinity(0))
    before = children()
    with pytest.warns(
        UserWarning,
        match="excessive worker creation might get DataLoader running slow or even freeze",
    ):
        loader_class(MAP, num_workers=usable + 1)
    assert children() == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader_class(MAP, num_workers=usable)
        loader_class(MAP, num_workers=0)


def test_the_warning_comes_again_at_iter(loader_class: Loader) -> None:
    usable = len(os.sched_getaffinity(0))
    with pytest.warns(UserWarning, match="excessive worker creation"):
        loader = loader_class(MAP, num_workers=usable + 1)
    with pytest.warns(UserWarning, match="excessive worker creation") as caught:
        assert len(list(loader)) == 5
    assert len([each for each in caught if "excessive" in str(each.message)]) == 1
