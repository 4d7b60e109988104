"""Errors of pinning are torch's, and cost one batch."""

from __future__ import annotations

from tests.accelerators.playing import play, said
from tests.lifecycle.trainer import Stage


def test_errors_are_raised_in_torchs_words_at_the_batch_that_has_them(stage: Stage) -> None:
    ended = play(
        stage,
        """
        class Refusing(Custom):
            def pin_memory(self):
                if int(self.value) == 2:
                    raise KeyError("no such page")
                if int(self.value) == 3:
                    raise ValueError("no room")
                return super().pin_memory()

        def collate(samples):
            return Refusing(samples[0][100].clone())

        torch.accelerator.set_device_index(1)
        for kind in (Stock, DataLoader):
            iterator = iter(kind(Images(6), num_workers=2, pin_memory=True, collate_fn=collate))
            while True:
                try:
                    say("batch", int(next(iterator).value))
                except StopIteration:
                    break
                except Exception as error:
                    text = str(error).splitlines()
                    say("error", type(error).__name__, text[0], text[1][:18], text[-1])
        """,
    )
    lines = [line for line in ended.lines if line.startswith(("batch", "error"))]
    half = len(lines) // 2
    assert lines[:half] == lines[half:]
    assert lines[2:4] == [
        "error KeyError Caught KeyError in pin memory thread for device 1. Original Traceback KeyError: 'no such page'",
        "error ValueError Caught ValueError in pin memory thread for device 1. Original Traceback ValueError: no room",
    ]
    assert said(ended)["batch"][:4] == ["0", "1", "4", "5"]


def test_lack_of_pinned_memory_costs_the_batches_that_lack_it(stage: Stage) -> None:
    ended = play(
        stage,
        """
        iterator = iter(DataLoader(Images(12), num_workers=1, pin_memory=True))
        next(iterator)
        slate.refuse(True)
        failed = 0
        while True:
            try:
                batch = next(iterator)
            except RuntimeError as error:
                failed += 1
                say("error", str(error).splitlines()[0], "no pinned memory is left" in str(error))
                slate.refuse(False)
            except StopIteration:
                break
        say("failed", failed > 0, int(batch[0, 100]))
        """,
    )
    assert set(said(ended)["error"]) == {
        "Caught RuntimeError in pin memory thread for device 0. True"
    }
    assert said(ended)["failed"] == ["True 11"]


def test_a_timeout_counts_pinning_too_and_loses_nothing(stage: Stage) -> None:
    ended = play(
        stage,
        """
        go_on = threading.Event()

        class Slow(Custom):
            def pin_memory(self):
                go_on.wait(SECONDS)
                return self

        def collate(samples):
            return Slow(samples[0][100].clone())

        iterator = iter(DataLoader(Images(6), num_workers=2, pin_memory=True, timeout=0.3,
                                   collate_fn=collate))
        for _ in range(2):
            try:
                next(iterator)
            except RuntimeError as error:
                say("error", str(error).splitlines()[0])
                say("awaited", str(error).partition("; ")[2])
        go_on.set()
        say("rest", [int(batch.value) for batch in iterator])
        """,
    )
    assert said(ended)["error"] == ["DataLoader timed out after 0.3 seconds"] * 2
    assert said(ended)["awaited"] == ["the batch has come, and is not pinned yet"] * 2
    assert said(ended)["rest"] == ["[0, 1, 2, 3, 4, 5]"]


def test_the_warnings_are_torchs(stage: Stage) -> None:
    ended = play(
        stage,
        """
        import warnings

        for kind in (Stock, DataLoader):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loader = kind(Images(4), num_workers=1, pin_memory=True, pin_memory_device="slate")
                say("pinned", [batch.is_pinned() for batch in loader])
            say("warned", sorted({str(one.message) for one in caught if "pin" in str(one.message)}))
            loader = kind(Images(2), num_workers=1, pin_memory_device="slate")
            say("alone", [batch.is_pinned() for batch in loader])
        """,
    )
    for word in ("pinned", "warned", "alone"):
        assert said(ended)[word][0] == said(ended)[word][1]
    assert said(ended)["pinned"][0] == str([True] * 4)
    assert said(ended)["alone"][0] == str([False] * 2)
