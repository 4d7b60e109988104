"""contract.md section 7, first half: what becomes of exceptions in datasets, collate functions and
start-up.

Tests that only holdfast can pass say so by their fixture: there stock torch hangs, loses the type,
or ends the epoch.
"""

from __future__ import annotations

import pickle
import re
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.errors import LoaderClosed
from tests.support import faulty
from tests.support.datasets import (
    Calls,
    Numbers,
    OneString,
    Raising,
    RaisingInBulk,
    RaisingStream,
    Unpicklable,
)
from tests.support.errors import error_of, error_of_next, outcomes
from tests.support.faulty import BAD, BAD_BATCH, BAD_WORKER, BATCH_SIZE, SIZE, failing
from tests.support.loaders import STOCK, Loader
from tests.support.parts import fail_in_worker_1, identity, refuses_pairs
from tests.support.scripts import run_script

pytestmark = pytest.mark.timeout(60)

WITH_WORKERS = {"batch_size": BATCH_SIZE, "num_workers": 2, "collate_fn": identity}
GOOD = [list(range(n, n + BATCH_SIZE)) for n in range(0, SIZE, BATCH_SIZE)]


def loader_of(loader_class: Loader, fail: Any, **arguments: Any) -> Any:
    return loader_class(Calls(SIZE, failing(fail)), **{**WITH_WORKERS, **arguments})


def the_one_error(loader: Any) -> Exception:
    """Iterates; everything but the bad batch must come, and at its place one error."""
    found = outcomes(iter(loader))
    assert len(found) == len(GOOD), found
    error = found[BAD_BATCH]
    assert isinstance(error, Exception), error
    assert [batch for batch in found if batch is not error] == [
        batch for batch in GOOD if BAD not in batch
    ]
    return error


def assert_torchs_text(error: Exception, kind: str) -> None:
    beginning = f"Caught {kind} in DataLoader worker process {BAD_WORKER}.\n"
    beginning += "Original Traceback (most recent call last):\n"
    assert str(error).startswith(beginning), str(error)


def assert_names_the_place(error: Exception) -> None:
    """What torch leaves out: sample, batch and worker, after torch's own text."""
    tail = str(error).rsplit("\n", 4)[-4:]
    added = "\n".join(line for line in tail if "File " not in line)
    assert re.search(rf"\bsample {BAD}\b", added), str(error)
    assert re.search(rf"\bbatch {BAD_BATCH}\b", added), str(error)
    assert re.search(rf"\bworker {BAD_WORKER}\b", added), str(error)


class AllBad(Numbers):
    def __getitem__(self, index: int) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("num_workers", [0, 4])
@pytest.mark.filterwarnings("ignore:.*excessive worker creation")
def test_every_bad_batch_raises_at_its_own_next_and_iteration_goes_on(
    loader_class: Loader, num_workers: int
) -> None:
    found = outcomes(iter(loader_class(AllBad(41), batch_size=2, num_workers=num_workers)))
    assert [type(each) for each in found] == [NotImplementedError] * 21


@pytest.mark.parametrize("num_workers", [0, 2])
def test_good_batches_around_a_bad_one_are_delivered(
    loader_class: Loader, num_workers: int
) -> None:
    error = the_one_error(loader_of(loader_class, faulty.value, num_workers=num_workers))
    assert type(error) is ValueError
    assert f"value at {BAD}" in str(error)


@pytest.mark.parametrize(
    ("fail", "kind", "text"),
    [
        (faulty.value, ValueError, f"ValueError: value at {BAD}\n"),
        (faulty.key, KeyError, "KeyError: 'key\\nof 35'\n"),
        (faulty.with_message, faulty.HasMessage, f"message of {BAD}\n"),
        (
            faulty.with_cause,
            ValueError,
            "The above exception was the direct cause of the following exception:",
        ),
        (
            faulty.with_context,
            ValueError,
            "During handling of the above exception, another exception occurred:",
        ),
        (faulty.missing_file, FileNotFoundError, "No such file or directory: '/no/such/file/35'\n"),
        (faulty.read_only, faulty.ReadOnly, f"read only at {BAD}"),
        (faulty.stop_async_iteration, StopAsyncIteration, f"stop at {BAD}"),
        (faulty.deep_recursion, RecursionError, "maximum recursion depth exceeded"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_an_exception_keeps_its_type_and_comes_with_torchs_text(
    loader_class: Loader, which: str, fail: Any, kind: type[Exception], text: str
) -> None:
    error = the_one_error(loader_of(loader_class, fail))
    assert type(error) is kind
    assert_torchs_text(error, kind.__name__)
    assert text in str(error)
    assert f"in {fail.__name__}\n" in str(error), "the user's own frames are in the traceback"
    if which != "stock":
        assert_names_the_place(error)


def test_a_key_error_is_printable(loader_class: Loader) -> None:
    error = the_one_error(loader_of(loader_class, faulty.key))
    assert "\n" in str(error)
    assert "\\nOriginal" not in str(error)


def test_the_printed_traceback_shows_the_workers_traceback_once(loader_class: Loader) -> None:
    error = the_one_error(loader_of(loader_class, faulty.value))
    printed = "".join(traceback.format_exception(error))
    assert printed.count("Original Traceback") == 1
    assert printed.count(f"ValueError: value at {BAD}") == 1


# --- Types that torch loses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail", "kind", "text"),
    [
        (faulty.three, faulty.TakesThree, f"come back later (503) at https://example.org/{BAD}"),
        (faulty.keywords, faulty.TakesKeywords, f"sample {BAD} is bad"),
        (faulty.with_message_property, faulty.MessageProperty, f"text of {BAD}"),
        (faulty.unpicklable, faulty.CannotBePickled, f"holds a lambda at {BAD}"),
        (faulty.refuses_pickle, faulty.RefusesPickle, f"refuses at {BAD}"),
        (faulty.breaks_on_unpickle, faulty.BreaksOnUnpickle, f"breaks at {BAD}"),
        (faulty.unicode_error, UnicodeDecodeError, "can't decode byte 0xff in position 0"),
        (faulty.json_error, ValueError, "JSONDecodeError"),
        (faulty.slotted, faulty.Slotted, "Slotted"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_an_exception_that_is_hard_to_rebuild_still_has_its_type_and_text(
    holdfast_class: Loader, fail: Any, kind: type[Exception], text: str
) -> None:
    error = the_one_error(loader_of(holdfast_class, fail))
    assert isinstance(error, kind)
    name = "JSONDecodeError" if fail is faulty.json_error else kind.__name__
    assert type(error).__name__ == name
    assert_torchs_text(error, name)
    assert text in str(error)
    assert_names_the_place(error)


def test_a_class_with_a_message_attribute_but_another_argument_keeps_its_type(
    holdfast_class: Loader,
) -> None:
    """torch calls it with message=… and raises a TypeError about that instead."""
    error = the_one_error(loader_of(holdfast_class, faulty.with_message_but_another))
    assert type(error).__name__ == "HasMessageButTakesAnother"
    assert isinstance(error, faulty.HasMessageButTakesAnother)
    assert (
        "Caught HasMessageButTakesAnother in DataLoader worker process 0.\nOriginal Traceback"
        in str(error)
    )
    assert_names_the_place(error)


def test_an_exception_whose_str_raises_keeps_its_type(loader_class: Loader) -> None:
    assert isinstance(the_one_error(loader_of(loader_class, faulty.bad_str)), faulty.BadStr)


def test_attributes_of_an_exception_are_kept(holdfast_class: Loader) -> None:
    error: Any = the_one_error(loader_of(holdfast_class, faulty.three))
    assert (error.code, error.url) == (503, f"https://example.org/{BAD}")
    error = the_one_error(loader_of(holdfast_class, faulty.keywords))
    assert error.what == f"sample {BAD} is bad"


def test_a_local_exception_class_arrives_as_its_nearest_known_base(holdfast_class: Loader) -> None:
    error = the_one_error(loader_of(holdfast_class, faulty.local_class))
    assert isinstance(error, LookupError)
    assert_torchs_text(error, "Local")
    assert f"local at {BAD}" in str(error)


@pytest.mark.parametrize(
    ("fail", "kind", "errno"),
    [(faulty.missing_file, FileNotFoundError, 2), (faulty.permission, PermissionError, 13)],
)
def test_an_os_error_keeps_its_errno(
    holdfast_class: Loader, fail: Any, kind: type[OSError], errno: int
) -> None:
    error = the_one_error(loader_of(holdfast_class, fail))
    assert type(error) is kind
    assert isinstance(error, OSError)
    assert error.errno == errno
    assert_torchs_text(error, kind.__name__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_notes_are_in_the_text(loader_class: Loader) -> None:
    error = the_one_error(loader_of(loader_class, faulty.with_note))
    assert type(error) is ValueError
    assert "the file came from the second disk" in str(error)


@pytest.mark.parametrize("fail", [faulty.with_cause, faulty.with_unpicklable_cause])
def test_a_cause_is_in_the_text(loader_class: Loader, fail: Any) -> None:
    error = the_one_error(loader_of(loader_class, fail))
    assert type(error) is ValueError
    assert "The above exception was the direct cause of the following exception:" in str(error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_an_exception_group_arrives_as_a_group(holdfast_class: Loader) -> None:
    error = the_one_error(loader_of(holdfast_class, faulty.group))
    assert isinstance(error, ExceptionGroup)  # noqa: F821
    assert [type(each) for each in error.exceptions] == [ValueError, OSError]
    assert error.split(OSError)[0] is not None
    assert "Caught ExceptionGroup in DataLoader worker process 0." in str(error)
    assert f"several at {BAD}" in str(error)


def test_an_arrived_exception_can_be_pickled_again(holdfast_class: Loader) -> None:
    """Trainers send it to other ranks."""
    for fail in (faulty.value, faulty.key, faulty.three, faulty.permission):
        error = the_one_error(loader_of(holdfast_class, fail))
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)


# --- What is not an Exception, or means something else --------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fail", [faulty.stop_iteration, faulty.next_of_an_empty_iterator])
@pytest.mark.parametrize("batch_size", [BATCH_SIZE, None])
def test_stop_iteration_from_a_sample_is_an_error_not_the_end_of_the_epoch(
    holdfast_class: Loader, num_workers: int, fail: Any, batch_size: int | None
) -> None:
    found = outcomes(
        iter(loader_of(holdfast_class, fail, num_workers=num_workers, batch_size=batch_size))
    )
    assert len(found) == (len(GOOD) if batch_size else SIZE)
    error = found[BAD_BATCH if batch_size else BAD]
    assert isinstance(error, RuntimeError)
    assert "StopIteration" in str(error)
    assert str(BAD) in str(error)
    assert sum(isinstance(each, Exception) for each in found) == 1


def stop_when_bad(batch: Any) -> Any:
    if BAD in batch:
        raise StopIteration
    return batch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stop_iteration_from_collate_is_an_error_too(
    holdfast_class: Loader, num_workers: int
) -> None:
    loader = holdfast_class(
        Numbers(SIZE), **{**WITH_WORKERS, "collate_fn": stop_when_bad, "num_workers": num_workers}
    )
    error = the_one_error(loader)
    assert isinstance(error, RuntimeError)
    assert "StopIteration" in str(error)


@pytest.mark.parametrize(
    ("fail", "name", "text"),
    [
        (faulty.system_exit, "SystemExit", f"leaving at {BAD}"),
        (faulty.system_exit_0, "SystemExit", "SystemExit"),
        (faulty.keyboard_interrupt, "KeyboardInterrupt", f"interrupted at {BAD}"),
        (faulty.generator_exit, "GeneratorExit", f"closed at {BAD}"),
        (faulty.base_exception, "OfItsOwn", f"base at {BAD}"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_is_not_an_exception_becomes_a_runtime_error_that_names_it(
    holdfast_class: Loader, fail: Any, name: str, text: str
) -> None:
    error = the_one_error(loader_of(holdfast_class, fail))
    assert isinstance(error, RuntimeError)
    assert_torchs_text(error, name)
    assert text in str(error)
    assert_names_the_place(error)


@pytest.mark.parametrize(
    ("fail", "kind"),
    [(faulty.system_exit, SystemExit), (faulty.keyboard_interrupt, KeyboardInterrupt)],
)
def test_without_workers_an_exit_is_an_exit(
    loader_class: Loader, fail: Any, kind: type[BaseException]
) -> None:
    iterator = iter(loader_of(loader_class, fail, num_workers=0))
    with pytest.raises(kind):
        for _ in iterator:
            pass


# --- Results that cannot be sent ------------------------------------------------------------------


def lambda_when_bad(index: int) -> Any:
    return (lambda: index) if index == BAD else index


class RaisesOnPickle:
    def __reduce__(self) -> Any:
        raise OSError(5, "the handle is gone")


def raises_on_pickle_when_bad(index: int) -> Any:
    return RaisesOnPickle() if index == BAD else index


def needs_grad_when_bad(index: int) -> Any:
    """torch refuses to send a tensor that is not a leaf and requires grad."""
    return torch.ones(1, requires_grad=True) * 2 if index == BAD else index


@pytest.mark.parametrize(
    "sample", [lambda_when_bad, raises_on_pickle_when_bad, needs_grad_when_bad]
)
def test_a_result_that_does_not_pickle_is_an_error_that_says_so(
    holdfast_class: Loader, sample: Any
) -> None:
    error = the_one_error(holdfast_class(Calls(SIZE, sample), **WITH_WORKERS))
    text = str(error)
    assert "in DataLoader worker process 0" in text
    assert re.search("pickle|send|serializ", text), text
    assert re.search(rf"\bbatch {BAD_BATCH}\b", text), text
    assert re.search(r"\bworker 0\b", text), text


def _cannot() -> None:
    raise ValueError("cannot come back")


class BreaksInTheMainProcess:
    def __reduce__(self) -> Any:
        return _cannot, ()


def breaks_in_main_when_bad(index: int) -> Any:
    return BreaksInTheMainProcess() if index == BAD else index


def test_a_result_that_does_not_unpickle_is_an_error_of_its_batch_only(
    holdfast_class: Loader,
) -> None:
    error = the_one_error(holdfast_class(Calls(SIZE, breaks_in_main_when_bad), **WITH_WORKERS))
    assert "cannot come back" in str(error)


class KeysThatDoNotPickle:
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        yield from (0, 1, 2, lambda: 3, 4, 5)


def test_a_key_that_does_not_pickle_is_an_error_and_not_a_hang(holdfast_class: Loader) -> None:
    """torch prints a traceback from a thread of its own, and waits for ever."""
    for prefetch_factor in (1, 4):
        loader = holdfast_class(
            Numbers(6),
            batch_size=None,
            sampler=KeysThatDoNotPickle(),
            num_workers=1,
            prefetch_factor=prefetch_factor,
        )
        error = error_of(lambda: list(loader))  # noqa: B023
        # In Python's words: "Can't pickle", or since 3.13 "Can't get local object".
        assert "KeysThatDoNotPickle.__iter__.<locals>.<lambda>" in str(error)


# --- Where else it can go wrong -------------------------------------------------------------------


def test_an_error_in_getitems_names_the_batch_and_the_worker(
    loader_class: Loader, which: str
) -> None:
    found = outcomes(
        iter(loader_class(RaisingInBulk(8), batch_size=2, num_workers=2, collate_fn=identity))
    )
    assert [type(each) for each in found] == [list, list, OneString, list]
    assert "Caught OneString in DataLoader worker process 0." in str(found[2])
    if which != "stock":
        last = str(found[2]).rsplit("\n", 1)[-1]
        assert re.search(r"\bbatch 2\b", last)
        assert re.search(r"\bworker 0\b", last)
        assert "[4, 5]" in last


def test_an_error_in_collate_names_the_batch_and_the_worker(
    loader_class: Loader, which: str
) -> None:
    found = outcomes(
        iter(loader_class(Numbers(9), batch_size=2, num_workers=2, collate_fn=refuses_pairs))
    )
    assert [type(each) for each in found] == [OneString] * 4 + [list]
    assert "Caught OneString in DataLoader worker process 1." in str(found[3])
    if which != "stock":
        last = str(found[3]).rsplit("\n", 1)[-1]
        assert re.search(r"\bbatch 3\b", last)
        assert re.search(r"\bworker 1\b", last)
        assert "[6, 7]" in last


def test_an_error_of_a_single_unbatched_sample_names_it(loader_class: Loader, which: str) -> None:
    found = outcomes(iter(loader_of(loader_class, faulty.value, batch_size=None)))
    assert [index for index, each in enumerate(found) if isinstance(each, Exception)] == [BAD]
    assert type(found[BAD]) is ValueError
    if which != "stock":
        last = str(found[BAD]).rsplit("\n", 1)[-1]
        assert re.search(rf"\bsample {BAD}\b", last)
        assert re.search(r"\bworker 1\b", last)


def test_an_error_in_a_stream_comes_with_type_and_text_and_ends_that_stream_only(
    loader_class: Loader,
) -> None:
    found = outcomes(
        iter(loader_class(RaisingStream(6), batch_size=None, num_workers=2, collate_fn=identity))
    )
    kinds = [type(each) for each in found]
    assert kinds == [dict] * 6 + [OneString] * 2
    assert "Caught OneString in DataLoader worker process 1.\nOriginal Traceback" in str(found[-1])
    assert "stream broke at 3" in str(found[-1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_iter_of_the_dataset_keeps_type_and_text(
    loader_class: Loader, num_workers: int
) -> None:
    loader = loader_class(RaisingStream(6, at_once=True), num_workers=num_workers)
    error = error_of(lambda: next(iter(loader)))
    assert type(error) is OneString
    assert "no stream today" in str(error)


def test_an_error_in_worker_init_fn_comes_at_the_first_next_of_that_worker(
    loader_class: Loader,
) -> None:
    iterator = iter(
        loader_class(Numbers(8), batch_size=None, num_workers=2, worker_init_fn=fail_in_worker_1)
    )
    assert next(iterator) == 0
    error = error_of_next(iterator)
    assert type(error) is OneString
    assert str(error).startswith(
        "Caught OneString in DataLoader worker process 1.\nOriginal Traceback"
    )
    assert "worker 1 will not start" in str(error)


def test_after_an_error_in_worker_init_fn_the_other_workers_batches_still_come(
    holdfast_class: Loader,
) -> None:
    """torch raises UnboundLocalError for each further batch of that worker."""
    found = outcomes(
        iter(
            holdfast_class(
                Numbers(6), batch_size=None, num_workers=2, worker_init_fn=fail_in_worker_1
            )
        )
    )
    assert found[0::2] == [0, 2, 4]
    for error in found[1::2]:
        assert type(error) is OneString
        assert "worker 1 will not start" in str(error)


class BrokenSampler:
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        yield from range(10)
        raise OneString("the sampler is out of order")


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_error_in_the_sampler_is_raised_as_it_is_where_torch_raises_it(
    loader_class: Loader, num_workers: int
) -> None:
    """With workers it comes as early as the sampler is read ahead. torch then loses the batch of
    that next(), and ends the epoch as if it were complete; holdfast does neither."""

    def found(of: Loader) -> list[Any]:
        loader = of(Numbers(20), batch_size=None, sampler=BrokenSampler(), num_workers=num_workers)
        return [
            str(each) if isinstance(each, OneString) else each for each in outcomes(iter(loader))
        ]

    mine, theirs = found(loader_class), found(STOCK)
    assert mine.count("the sampler is out of order") == 1
    at = theirs.index("the sampler is out of order")
    assert mine[: at + 1] == theirs[: at + 1]
    if loader_class is STOCK or num_workers == 0:
        assert mine == theirs
    else:
        *rest, last = mine[at + 1 :]
        assert mine[:at] + rest == list(range(10))
        assert isinstance(last, LoaderClosed)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_after_an_error_the_loader_can_be_iterated_again(
    loader_class: Loader, persistent_workers: bool
) -> None:
    loader = loader_class(
        Raising(9),
        batch_size=None,
        num_workers=2,
        persistent_workers=persistent_workers,
        collate_fn=identity,
    )
    for _ in range(3):
        kinds = [type(each) for each in outcomes(iter(loader))]
        assert kinds == [dict, ValueError, dict, dict, KeyError, dict, dict, OneString, dict]


# --- Start-up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_an_unpicklable_dataset_fails_with_torchs_warning(
    loader_class: Loader, which: str, context: str
) -> None:
    loader = loader_class(Unpicklable(4), num_workers=2, multiprocessing_context=context)
    with (
        pytest.warns(UserWarning, match="Got pickle error when"),
        pytest.raises((AttributeError, TypeError, pickle.PicklingError)) as raised,
    ):
        next(iter(loader))
    raised.value.__traceback__ = None
    assert "lambda" in str(raised.value)
    if which != "stock":
        assert re.search(r"dataset\.transform\.steps\[1\]", str(raised.value)), str(raised.value)


@pytest.mark.parametrize("argument", ["collate_fn", "worker_init_fn"])
def test_an_unpicklable_function_is_named(holdfast_class: Loader, argument: str) -> None:
    loader = holdfast_class(
        Numbers(4),
        num_workers=1,
        multiprocessing_context="spawn",
        **{argument: lambda value: value},
    )
    with (
        pytest.warns(UserWarning, match="Got pickle error when") as warned,
        pytest.raises((AttributeError, TypeError, pickle.PicklingError), match=argument) as raised,
    ):
        next(iter(loader))
    raised.value.__traceback__ = None
    assert [one.filename for one in warned] == [__file__]


def test_an_unpicklable_dataset_is_no_problem_under_fork(loader_class: Loader) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = loader_class(
            Unpicklable(3), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        assert list(loader) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_dataset_that_the_worker_cannot_import_is_named(
    holdfast_class: Loader, monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    """As in a notebook: the class exists in the trainer only. torch: "exited unexpectedly"."""
    module = types.ModuleType("only_in_the_trainer")
    module.Made = type("Made", (Numbers,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    loader = holdfast_class(module.Made(4), num_workers=2, multiprocessing_context=context)  # type: ignore[attr-defined]
    error = error_of(lambda: next(iter(loader)))
    assert isinstance(error, RuntimeError)
    assert "No module named 'only_in_the_trainer'" in str(error), str(error)


UNGUARDED = """
    from tests.support.datasets import Numbers
    print("main runs", flush=True)
    loader = DataLoader(Numbers(4), batch_size=None, num_workers=2, multiprocessing_context="spawn")
    print(list(loader))
"""


def test_a_script_without_main_guard_says_so_and_ends(which_script: str) -> None:
    ended = run_script(which_script, UNGUARDED, as_file=True)
    assert ended.code not in (0, None)
    assert "bootstrapping phase" in ended.err
    assert not ended.left
    if which_script != "stock":
        assert ended.out.count("main runs") <= 3, (
            "a worker that cannot start is not started again and again"
        )
        last = ended.err[ended.err.rindex("Error: ") :]
        assert "__main__" in last, f"the error itself does not quote the child: {last}"


@pytest.mark.slow  # others run such scripts too
def test_the_same_script_with_a_guard_works(which_script: str) -> None:
    guarded = UNGUARDED.replace(
        "    loader =", '    if __name__ == "__main__":\n      loader ='
    ).replace("    print(list", "      print(list")
    ended = run_script(which_script, guarded, as_file=True)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith("[0, 1, 2, 3]\n")
