"""The page in a real Chromium: it draws, reacts, and shows every text as text."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.autopsy.logbook import Logbook
from holdfast.run_report import page as pages
from holdfast.run_report.live_page import LivePage
from holdfast.run_report.logged_run import read
from holdfast.run_report.story import tell
from holdfast.tuning import advice
from holdfast.tuning.search import Request
from tests.run_report import browser
from tests.support import logbooks
from tests.tuning.machine import Machine, searched

pytestmark = [
    pytest.mark.report,
    pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing())),
]

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.started() as started:
        yield started


@pytest.fixture
def open_page(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a page in a context of its own, and fails if it complains or asks for anything."""
    complaints: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_it(address: str | None = None, *, expect: str = "", **options: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        where = address or (tmp_path / "report.html").as_uri()
        page.goto(where)
        page.wait_for_selector("#foot p")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints == []
    outside = [url for url in asked if not url.startswith(("file:", "data:", "http://127.0.0.1:"))]
    assert outside == [], "a request would leave the machine"


def make(folder: Path, **run: Any) -> None:
    logbooks.write(folder / "log", **run)
    story = tell(read(folder / "log"), "A run", time.time())
    (folder / "report.html").write_text(pages.render(story), encoding="utf-8")


def painted(page: Any, chart: str) -> int:
    """How many different colours a chart's canvas has: one if nothing was drawn."""
    return int(
        page.evaluate(
            """(chart) => {
              const canvas = document.querySelector(`#chart-${chart} canvas`);
              const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
              const seen = new Set();
              for (let at = 0; at < data.length; at += 4)
                if (data[at + 3] > 200) seen.add(`${data[at]} ${data[at + 1]} ${data[at + 2]}`);
              return seen.size;
            }""",
            chart,
        )
    )


def test_the_charts_are_drawn_and_react(open_page: Open, tmp_path: Path) -> None:
    make(tmp_path)
    page = open_page()
    assert page.locator("#headline .value").count() == 6
    for chart in ("rate", "waiting", "steps", "memory-0", "times-0", "sizes-0"):
        assert painted(page, chart) > 2, chart
    before = range_of(page)
    place = page.locator("#chart-memory-0")
    place.scroll_into_view_if_needed()
    box = place.locator(".u-over").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 3, middle)
    worker = place.get_by_role("button", name="worker 0")
    assert "MiB" in worker.text_content(), "the legend shows the values at the cursor"
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, middle, steps=5)
    page.mouse.up()
    page.wait_for_function("() => !document.querySelector('#chart-rate .reset').hidden")
    page.wait_for_timeout(100)
    assert place.locator(".reset").is_visible(), "all charts over time are enlarged together"
    assert range_of(page) < 0.5 * before
    place.locator(".reset").click()
    page.wait_for_timeout(100)
    assert range_of(page) == pytest.approx(before, rel=0.02)
    worker.click()
    assert worker.get_attribute("aria-pressed") == "false"


def range_of(page: Any) -> float:
    """Seconds between the first and the last value that the cursor reaches in a chart."""
    page.locator("#chart-rate").scroll_into_view_if_needed()
    times = []
    for part in (0.002, 0.998):
        box = page.locator("#chart-rate .u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] * 0.7)
        shown = page.locator("#chart-rate .note").text_content()
        # A marker's text begins with the time too.
        hours, minutes, seconds = shown.split()[0].split(":")
        times.append(3600 * int(hours) + 60 * int(minutes) + int(seconds))
    page.mouse.move(0, 0)
    return float((times[1] - times[0]) % 86400)


def test_the_keyboard_reaches_everything(open_page: Open, tmp_path: Path) -> None:
    make(tmp_path)
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    chart = page.locator("#chart-rate")
    chart.focus()
    assert "arrow keys" in chart.get_attribute("aria-label")
    page.keyboard.press("ArrowRight")
    assert "samples a second" in page.locator("#said").text_content()
    page.keyboard.press("+")
    page.wait_for_function("() => !document.querySelector('#chart-memory-0 .reset').hidden")
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.querySelector('#chart-memory-0 .reset').hidden")
    page.locator("#incident-0 > summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#incident-0 >> text=Why we think so").is_visible()
    page.locator("#chart-rate details.fold > summary").press("Enter")
    page.wait_for_selector("#chart-rate table")
    assert page.locator("#chart-rate table tbody tr").count() > 10
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, a")].filter((one) =>
             !(one.textContent.trim() || one.getAttribute("aria-label") || one.labels?.length)).length"""
    )
    assert unnamed == 0


def test_cards_unfold_and_a_marker_leads_to_its_card(open_page: Open, tmp_path: Path) -> None:
    make(tmp_path, incidents=4)
    page = open_page()
    card = page.locator("#incident-1")
    assert not card.locator("text=What to do, cheapest first").is_visible()
    card.locator("> summary").click()
    assert card.locator("text=What to do, cheapest first").is_visible()
    assert not card.locator("pre", has_text="Fatal Python error").is_visible(), "folded"
    card.locator(".stack > summary").click()
    assert card.locator("pre", has_text="Fatal Python error").is_visible()
    card.locator(".evidence > summary").click()
    assert card.locator("dd", has_text="</script>").is_visible()

    page.locator("#incidents button", has_text="native-segv").click()
    assert page.locator("#incidents details.card").count() == 1
    page.locator("#incidents button", has_text="all (4)").click()
    assert page.locator("#incidents details.card").count() == 4
    assert page.locator("#incident-1").get_attribute("open") is not None, "it stays open"

    place = page.locator("#chart-rate")
    place.scroll_into_view_if_needed()
    box = place.locator(".u-over").bounding_box()
    for step in range(int(box["width"] // 3)):  # until the cursor is at a marker
        page.mouse.move(box["x"] + 3 * step, box["y"] + 40)
        if place.locator(".note.hit").count():
            break
    assert "was killed for lack of memory" in place.locator(".note").text_content()
    page.mouse.click(box["x"] + 3 * step, box["y"] + 40)
    page.wait_for_selector("details.card.struck[open]")


def test_the_table_sorts_and_filters(open_page: Open, tmp_path: Path) -> None:
    make(tmp_path, bad=150)
    page = open_page()
    rows = page.locator("#bad-table tbody tr")
    assert rows.count() == 100
    page.locator("#bad .more-rows").click()
    assert rows.count() == 150

    def names() -> list[str]:
        return [str(one) for one in page.locator("#bad-table td:first-child").all_text_contents()]

    head = page.locator("#bad-table th", has_text="Sample")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    first = names()
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert names() == first[::-1]
    search = page.get_by_label("Search bad samples")
    search.fill("00117")
    assert rows.count() == 1
    assert "1 of 150" in page.locator("#bad-count").text_content()
    search.fill("OSError skipped")
    assert rows.count() == 50
    search.fill("no such thing")
    assert rows.count() == 0


def test_texts_of_the_logbook_are_shown_as_text(open_page: Open, tmp_path: Path) -> None:
    make(tmp_path, bad=6)
    page = open_page()
    for one in page.locator("details").all():
        one.evaluate("(element) => { element.open = true; }")
    assert page.evaluate("window.struck") is None
    assert page.title() == "A run – holdfast report"
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3
    assert logbooks.MARKUP in page.locator("#bad").text_content()
    assert logbooks.SCRIPT in page.locator("#incident-0 > summary").text_content()
    assert logbooks.SCRIPT in page.locator("#incident-0 .evidence").text_content()
    assert logbooks.MARKUP in page.locator("#samples").text_content()
    assert logbooks.MARKUP in page.locator("#setup").text_content()


def test_ranks_and_loaders_can_be_chosen(open_page: Open, tmp_path: Path) -> None:
    make(tmp_path, hours=0.5, ranks=3, loaders=("train", "val"), incidents=2)
    page = open_page()
    assert page.locator("#chart-memory-2 canvas").count() == 1
    shared = page.locator("#chart-memory-2").get_by_role("button", name="shared memory")
    swatches = shared.locator(".swatch")
    colours = swatches.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(set(colours)) == 2, colours
    assert page.locator("#incidents details.card").count() == 12
    page.locator("#choose-rank").select_option("2")
    assert page.locator("#chart-memory-0").count() == 0
    assert page.locator("#incidents details.card").count() == 4
    page.locator("#choose-loader").select_option(label="val")
    assert page.locator("#incidents details.card").count() == 2
    assert page.locator("#chart-rate .legend button").count() == 1
    assert page.evaluate("document.activeElement.id") == "choose-loader"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_light_and_dark_wide_and_narrow(
    open_page: Open, tmp_path: Path, scheme: str, width: int
) -> None:
    make(tmp_path, hours=0.5, bad=3)
    page = open_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#incident-0 > summary").click()
    ground, ink = page.evaluate(
        """() => { const style = getComputedStyle(document.body);
                   return [style.backgroundColor, style.color]; }"""
    )
    shades = [sum(map(int, one[4:-1].split(","))) for one in (ground, ink)]
    assert (shades[0] > shades[1]) == (scheme == "light")
    page.set_viewport_size({"width": 700, "height": 800})
    page.wait_for_timeout(100)
    assert page.locator("#chart-rate canvas").bounding_box()["width"] <= 700


def test_it_can_be_printed(open_page: Open, tmp_path: Path) -> None:
    make(tmp_path, hours=0.5, bad=3)
    page = open_page(color_scheme="dark")
    content = page.pdf()
    assert content.startswith(b"%PDF")
    assert len(content) > 20_000
    page.emulate_media(media="print")
    page.wait_for_function(
        "() => getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'"
    )
    assert page.locator("nav").is_hidden()
    grid = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--grid')")
    assert grid.strip() == "#e8ebef", "paper is light, whatever the screen is"


def test_a_run_of_days_opens_within_a_second(
    open_page: Open, chromium: Any, tmp_path: Path
) -> None:
    """Of processor time of the page's thread, which does not depend on what else the machine does:
    parsing, layout and the drawing of all charts."""
    make(
        tmp_path, hours=96, every=120, ranks=4, workers=8, loaders=("train", "val"),
        incidents=400, bad=2000,
    )  # fmt: skip
    size = (tmp_path / "report.html").stat().st_size
    assert size < 10_000_000
    page = open_page()
    assert painted(page, "rate") > 2
    assert page.locator("#incidents details.card").count() == 50
    context = chromium.new_context()
    again = context.new_page()
    counters = context.new_cdp_session(again)
    counters.send("Performance.enable", {"timeDomain": "threadTicks"})
    again.goto((tmp_path / "report.html").as_uri())
    again.wait_for_selector("#foot p")
    found = counters.send("Performance.getMetrics")["metrics"]
    seconds = next(one["value"] for one in found if one["name"] == "TaskDuration")
    context.close()
    print(f"{size / 1e6:.1f} MB, shown after {seconds:.2f} s of processor time")
    assert 0 < seconds < 1


def test_pages_of_unusual_logbooks(open_page: Open, tmp_path: Path) -> None:
    make(tmp_path, hours=0.5, incidents=0, bad=0, ended=False)
    page = open_page()
    assert page.locator("#state").text_content() == "stopped without an end"
    assert page.locator("text=No worker died, stalled or failed to start.").is_visible()
    for kind in ("progress", "memory", "loaders"):
        (tmp_path / "log" / f"{kind}.jsonl").unlink()
    story = tell(read(tmp_path / "log"), "A run", time.time())
    (tmp_path / "report.html").write_text(pages.render(story))
    page = open_page()
    assert page.locator("text=This logbook has no records of progress").is_visible()


def test_what_was_tuned_is_drawn_and_told(open_page: Open, tmp_path: Path) -> None:
    found = searched(Machine(cores=4, cpu=0.02, lock=True), starts=("fork", "spawn"))
    request = Request(batch_size=64)
    record = advice.plain(found, advice.advise(found, request), request)
    record["notes"] = [logbooks.MARKUP, logbooks.SCRIPT]
    log = Logbook(tmp_path / "log", rank=0, loader="data:train")
    log.tuning({"target": "data:train", **record})
    story = tell(read(tmp_path / "log"), "A run", time.time())
    (tmp_path / "report.html").write_text(pages.render(story), encoding="utf-8")
    page = open_page()
    assert page.locator("#state").inner_text() == "tuning"
    assert page.locator("#tuning pre").first.inner_text() == (
        "loader = DataLoader(dataset, batch_size=64, num_workers=4, prefetch_factor=2)"
    )
    assert "What limits: CPU" in page.locator("#tuning").inner_text()
    chart = page.locator("#chart-tuning-0")
    assert painted(page, "tuning-0") > 2
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert "0 workers: processes" in page.locator("#said").inner_text()
    page.locator("#tuning summary").click()
    assert page.locator("#tuning .fold tbody tr").count() == len(record["tried"])
    assert page.locator("#time").count() == 0  # there was no run
    assert page.evaluate("window.struck") is None


def test_a_loader_without_workers_has_its_throughput_and_its_share_of_loading(
    open_page: Open, tmp_path: Path
) -> None:
    logbooks.write(tmp_path / "log", hours=0.1, workers=0, incidents=0, bad=2)
    path = tmp_path / "log" / "progress.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    drop = (
        "in_flight",
        "budget",
        "shared_bytes",
        "held_bytes",
        "times",
        "sizes",
        "slowest",
        "largest",
    )
    for record in records:
        record.update(bytes=0, seconds={}, workers={}, wait_seconds=0.6 * record["elapsed"])
        for name in drop:
            record.pop(name, None)
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    story = tell(read(tmp_path / "log"), "A run", time.time())
    (tmp_path / "report.html").write_text(pages.render(story), encoding="utf-8")
    page = open_page()
    assert (
        "there are no workers. It took 60% of the time"
        in page.locator("#bottleneck").text_content()
    )
    assert (
        "Loading data (it has no workers) 60%" in page.locator("#time .keys").first.text_content()
    )
    for chart in ("rate", "waiting", "memory-0"):
        assert painted(page, chart) > 2, chart
    assert page.locator("#chart-steps").count() == 0
    assert page.locator("text=What workers did").count() == 0


def test_a_logbook_that_was_cut_off_in_the_middle_of_a_line(
    open_page: Open, tmp_path: Path
) -> None:
    """As a power failure leaves it: the last lines of each file are torn, one has zeros."""
    logbooks.write(tmp_path / "log", hours=0.5, incidents=3, bad=3, ended=False)
    for path in (tmp_path / "log").glob("*.jsonl"):
        content = path.read_bytes()
        path.write_bytes(
            content[: len(content) - 40] + (b"\0" * 512 if path.stem == "memory" else b"")
        )
    story = tell(read(tmp_path / "log"), "A run", time.time())
    (tmp_path / "report.html").write_text(pages.render(story), encoding="utf-8")
    page = open_page()
    assert page.locator("#state").text_content() == "stopped without an end"
    assert page.locator("#incidents details.card").count() == 2
    assert page.locator("#bad-table tbody tr").count() == 2
    assert painted(page, "rate") > 2
    assert painted(page, "memory-0") > 2


def test_a_screen_reader_finds_landmarks_headings_and_words_for_what_is_drawn(
    open_page: Open, tmp_path: Path
) -> None:
    make(tmp_path, hours=0.5)
    page = open_page()
    assert page.evaluate("document.documentElement.lang") == "en"
    for landmark in ("main", "navigation"):
        assert page.get_by_role(landmark).count() >= 1, landmark
    levels = page.evaluate(
        """() => [...document.querySelectorAll("h1, h2, h3, h4")].map((one) => +one.tagName[1])"""
    )
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), (
        "none is left out"
    )
    charts = page.locator(".chart")
    assert charts.count() >= 5
    for chart in charts.all():
        assert chart.get_attribute("aria-label"), chart
    bars = page.get_by_role("img")
    assert bars.count() >= 2
    assert all("%" in bar.get_attribute("aria-label") for bar in bars.all())
    assert page.locator("#said").get_attribute("aria-live") == "polite"
    for head in page.locator("#bad-table th").all():
        assert head.get_attribute("scope") == "col"


def test_the_live_page_is_for_those_with_the_token_on_this_machine(
    open_page: Open, chromium: Any, tmp_path: Path
) -> None:
    logbooks.write(tmp_path, hours=0.01, began=time.time() - 36, ended=False, bad=0, incidents=0)
    with LivePage(tmp_path, "A run", every=0.2) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            page = open_page(server.address)
            assert page.locator("#state").text_content() == "still running"
            page.context.close()
            stranger = chromium.new_page()
            root, _, token = server.address.rstrip("/").rpartition("/")
            assert len(token) > 20
            for path in ("/", f"/{token[:-1]}x/"):
                answer = stranger.goto(root + path)
                assert answer.status in (403, 404)
                assert "A run" not in stranger.content()
            stranger.close()
        finally:
            server.shutdown()
            thread.join(10)


def test_the_live_page_follows_the_run(open_page: Open, tmp_path: Path) -> None:
    now = time.time()
    logbooks.write(tmp_path, hours=0.01, began=now - 36, ended=False, bad=0, incidents=1)
    with LivePage(tmp_path, "A run", every=0.2) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            page = open_page(server.address)
            assert page.locator("#state").text_content() == "still running"
            page.locator("#incident-0 > summary").click()
            before = page.locator("#headline .value").first.text_content()
            logbooks.write(tmp_path, hours=0.01, began=now - 30, seed=1, bad=0, incidents=1)
            page.wait_for_function(
                "(before) => document.querySelector('#headline .value').textContent !== before",
                arg=before,
            )
            assert page.locator("details.card[open]").count() == 1, "what was open stays open"
            assert page.evaluate("document.activeElement.tagName") == "SUMMARY", "and the focus"
            page.context.close()
        finally:
            server.shutdown()
            thread.join(10)
