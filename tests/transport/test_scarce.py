"""Where something is scarce: a /dev/shm of 64 MB, or full, few descriptors, little address space."""

from __future__ import annotations

import os

import pytest

from tests.lifecycle.trainer import Stage
from tests.support.warm import mounting

pytestmark = pytest.mark.timeout(120, method="thread")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="a private /dev/shm takes root")


def shm(options: str) -> str:
    return mounting({"/dev/shm": options})


EPOCHS = """
        from tests.transport.test_descriptors import COLLATE
        from tests.transport.test_kept_batches import Blocks

        def intact(batch, number):
            while isinstance(batch, list):
                batch = batch[0]
            return bool((batch == number).all())

        def epoch(collate, kept, **options):
            loader = DataLoader(Blocks(40, elements=250_000), num_workers=2, collate_fn=collate, **options)
            for number, batch in enumerate(loader):
                assert intact(batch, number)
                kept.append(batch)
            assert number == 39
            assert all(intact(batch, number) for number, batch in enumerate(kept))
            assert not loader.incidents
            loader.close()
"""


@as_root
@pytest.mark.slow
@pytest.mark.parametrize("size", ["64m", "4k"])
def test_a_small_dev_shm_does_not_matter(stage: Stage, size: str) -> None:
    """80 MB of batches are kept, by each way to collate. The quick suite does the same with one in which not a byte is
    free, below."""
    ended = stage.run(
        f"""
        {EPOCHS}
        for collate in COLLATE.values():
            epoch(collate, [])
        say("done", os.listdir("/dev/shm"))
        """,
        before=shm(f"size={size}"),
    )
    assert ended.err == ""
    assert ended.values("done") == ["[]"]
    assert ended.code == 0


@as_root
@pytest.mark.parametrize(
    "method",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.slow),
        pytest.param("forkserver", marks=pytest.mark.slow),
    ],
)
def test_a_full_dev_shm_does_not_matter(stage: Stage, method: str) -> None:
    ended = stage.run(
        f"""
        {EPOCHS}
        with open("/dev/shm/filler", "wb") as file:
            try:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            except OSError as error:
                say("full", error.errno)
            try:
                file.close()
            except OSError:
                pass
        for collate in COLLATE.values():
            epoch(collate, [], multiprocessing_context={method!r})
        say("done", os.listdir("/dev/shm"))
        """,
        before=shm("size=64m"),
        seconds=60,
    )
    assert ended.err == ""
    assert ended.values("full") == ["28"]
    assert ended.values("done") == ["['filler']"]
    assert ended.code == 0


@pytest.mark.slow
@as_root
def test_a_process_that_fills_dev_shm_while_we_load_does_not_matter(stage: Stage) -> None:
    ended = stage.run(
        f"""
        {EPOCHS}
        filler = os.fork()
        if filler == 0:
            while True:
                try:
                    with open("/dev/shm/filler", "wb", buffering=0) as file:
                        while True:
                            file.write(bytes(1 << 20))
                except OSError:
                    say("full")
        while not os.path.exists("/dev/shm/filler"):
            time.sleep(0.01)
        for collate in COLLATE.values():
            epoch(collate, [])
        os.kill(filler, signal.SIGKILL)
        os.waitpid(filler, 0)
        say("done")
        """,
        before=shm("size=16m"),
    )
    assert ended.err == ""
    assert ended.values("full")
    assert ended.code == 0
    assert ended.values("done") == [""]


@as_root
@pytest.mark.parametrize("method", ["spawn"])
@pytest.mark.slow
def test_a_data_set_larger_than_dev_shm_can_be_sent_to_spawned_workers(
    stage: Stage, method: str
) -> None:
    """torch's pickling moves every tensor of the data set to /dev/shm."""
    ended = stage.run(
        f"""
        from torch.utils.data import TensorDataset
        data = torch.arange(12_000_000).reshape(1200, -1)
        loader = DataLoader(TensorDataset(data), num_workers=1, batch_size=100, multiprocessing_context={method!r})
        say("sum", sum(int(batch.sum()) for batch, in loader) == int(data.sum()))
        """,
        before=shm("size=64m"),
        seconds=60,
    )
    assert ended.err == ""
    assert ended.values("sum") == ["True"]


def test_sixteen_workers_and_kept_batches_need_fewer_than_256_descriptors(stage: Stage) -> None:
    ended = stage.run(
        """
        import resource, warnings
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        from tests.transport.test_kept_batches import Blocks

        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        loader = DataLoader(Blocks(500), num_workers=16)
        kept = list(loader)
        assert all(bool((batch == number).all()) for number, batch in enumerate(kept))
        assert len(kept) == 500 and not loader.incidents
        say("done")
        """,
        seconds=90,
    )
    assert ended.err == ""
    assert ended.code == 0
    assert ended.values("done")


@pytest.mark.slow
def test_epochs_of_which_batches_are_kept_get_along_with_256_descriptors(stage: Stage) -> None:
    ended = stage.run(
        """
        import resource
        from tests.transport.test_kept_batches import Blocks

        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        kept = []
        for epoch in range(130):
            kept += list(DataLoader(Blocks(2), num_workers=2))
        assert all(bool((batch == number % 2).all()) for number, batch in enumerate(kept))
        say("done")
        """,
        seconds=90,
    )
    assert ended.err == ""
    assert ended.code == 0
    assert ended.values("done")


@pytest.mark.parametrize("extra", [1 << 30, 300 << 20])
def test_little_address_space_makes_small_arenas_and_nothing_is_lost(
    stage: Stage, extra: int
) -> None:
    """Under `ulimit -v` the arena takes less, and what does not fit travels through the channel."""
    ended = stage.run(
        f"""
        import resource
        from tests.transport.test_kept_batches import Blocks

        size = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + {extra},) * 2)
        loader = DataLoader(Blocks(60, elements=250_000), num_workers=2)
        for number, batch in enumerate(loader):
            assert bool((batch == number).all())
        assert number == 59 and not loader.incidents
        say("done")
        """,
        seconds=60,
    )
    assert ended.err == ""
    assert ended.code == 0
    assert ended.values("done")


def test_a_limit_on_file_sizes_is_no_limit_on_batches(stage: Stage) -> None:
    """RLIMIT_FSIZE holds for memory files, too."""
    ended = stage.run(
        """
        import resource
        from tests.transport.test_kept_batches import Blocks

        resource.setrlimit(resource.RLIMIT_FSIZE, (70 << 20,) * 2)
        loader = DataLoader(Blocks(100, elements=250_000), num_workers=2)
        kept = list(loader)  # 100 MB from each worker
        assert all(bool((batch == number).all()) for number, batch in enumerate(kept))
        say("done")
        """,
        seconds=60,
    )
    assert ended.err == ""
    assert ended.code == 0
    assert ended.values("done")
