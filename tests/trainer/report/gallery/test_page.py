"""gallery.html in a real browser: everything is there, nothing is asked of the network, prompts stay text."""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tests.trainer.report.gallery.chromium import Tab, tab
from tests.trainer.report.served import get, served

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import ConfigError, StorageError
from fluxtrain.report.gallery import (
    MOST_PROMPTS,
    MOST_STEPS,
    Pictures,
    RunPage,
    compare_runs,
)
from fluxtrain.report.page import SCRIPT, Contents, History, render
from fluxtrain.runtime.progress import Progress

pytestmark = pytest.mark.slow

HOSTILE = "<script>document.title='owned'</script>\"'><img src=x onerror=alert(1)> ü 😀"


def make_samples(output: Path, step: int, prompts: list[str], size: tuple[int, int]) -> Path:
    """Write the images of ``step``; return the path of their grid."""
    folder = output / "samples" / f"step_{step:07d}"
    folder.mkdir(parents=True)
    for index, prompt in enumerate(prompts):
        info = PngInfo()
        for key, value in {"prompt": prompt, "seed": "42", "steps": "28"}.items():
            info.add_itxt(key, value)
        colour = (index * 60 % 256, step % 256, 128)
        Image.new("RGB", size, colour).save(folder / f"{index:02d}.png", pnginfo=info)
    return folder.with_suffix(".png")


def record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "samples": step * 16,
        "train_loss": 1.5 / (1 + step / 50) + 0.02 * (step % 7),
        "samples_per_second": 123.4,
        "seconds": step * 0.5,
        "memory_allocated_bytes": 3 << 30,
        "mfu": None,
    }


def make_page(output: Path, prompts: list[str], steps: int = 4) -> RunPage:
    page = RunPage(resolve({"preset": "micro", "schedule": {"steps": 1000}}), output)
    for step in range(1, steps + 1):
        page.write(record(100 * step))
        page.write({"step": 100 * step, "samples": 1600 * step, "eval_loss": 1.0 / step})
        page.show(1600 * step, make_samples(output, 100 * step, prompts, (96, 64)))
    return page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Return a page of Debian's Chromium, which is installed if it is missing."""
    with tab(tmp_path_factory.mktemp("browser")) as page:
        yield page


def opened(browser: Tab, address: str, *size: int) -> str:
    """Open ``address``; return the document after scripts have run, as the browser has it."""
    browser.open(address, *size)
    text: str = browser.run("document.documentElement.outerHTML")
    return text


def test_a_browser_shows_the_samples_and_the_curves(browser: Tab, tmp_path: Path) -> None:
    output = tmp_path / "style"
    make_page(output, ["a red heart", "a house"]).close()
    text = opened(browser, (output / "gallery.html").as_uri())
    assert "a red heart" in text
    assert [f"step {step}" in text for step in (100, 200, 300, 400)] == [True] * 4
    assert "<polyline" in text
    browser.picture(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    near = [each for each in colours if abs(each[1] - 144) < 6 and abs(each[2] - 128) < 6]
    assert near, "the samples of step 400 are drawn"
    assert browser.refused == []
    assert {each.split(":")[0] for each in browser.requests} <= {"file", "data"}


@pytest.mark.parametrize("width", [390, 820, 1440])
def test_the_newest_comes_first_at_any_width(browser: Tab, tmp_path: Path, width: int) -> None:
    make_page(tmp_path / "run", ["a" * 300, "b"]).close()
    opened(browser, (tmp_path / "run/gallery.html").as_uri(), width, 900)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    left = "document.querySelector('.strip figcaption').getBoundingClientRect()"
    assert browser.run("document.querySelector('.strip figcaption').innerText") == "step 400"
    assert 0 <= browser.run(f"{left}.left") < width - 100


def test_a_slider_compares_before_and_after(browser: Tab, tmp_path: Path) -> None:
    make_page(tmp_path / "run", ["a"]).close()
    opened(browser, (tmp_path / "run/gallery.html").as_uri())
    chosen = "[...document.querySelectorAll('select')].map(each => each.value)"
    assert browser.run(chosen) == ["step 100", "step 400"]
    at = "document.querySelector('.compare').style.getPropertyValue('--at')"
    assert browser.run(at) == "50%"
    browser.run("document.querySelector('.compare input').focus()")
    browser.key("ArrowRight")
    assert browser.run(at) == "51%"
    box = browser.run(
        "(({x, y, width}) => [x, y, width])"
        "(document.querySelector('.compare').getBoundingClientRect())"
    )
    browser.mouse("mousePressed", box[0] + box[2] / 2, box[1] + 20, 1)
    browser.mouse("mouseMoved", box[0] + box[2] * 0.8, box[1] + 20, 1)
    browser.mouse("mouseReleased", box[0] + box[2] * 0.8, box[1] + 20)
    assert 78 <= float(browser.run(at).removesuffix("%")) <= 82


def test_a_larger_image_opens_in_the_page(browser: Tab, tmp_path: Path) -> None:
    output = tmp_path / "a run: #1?"
    make_page(output, ["a", "b"]).close()
    opened(browser, (output / "gallery.html").as_uri())
    words = "document.querySelector('dialog p').innerText"
    browser.run("document.querySelector('.strip a').click()")
    assert browser.run(words).startswith("step 400 · 1 of 4 · a")
    browser.key("ArrowRight")
    browser.key("ArrowDown")
    assert browser.run(words).startswith("step 300 · 2 of 4 · b")
    loaded = "document.querySelector('dialog img')"
    browser.wait_for(f"{loaded}.complete && {loaded}.naturalWidth > 0")
    assert browser.run(f"{loaded}.src").endswith("samples/step_0000300/01.png")
    assert browser.run(f"{loaded}.naturalWidth") == 96
    browser.key("Escape")
    assert browser.run("document.querySelector('dialog').open") is False


def test_values_are_told_at_a_step(browser: Tab, tmp_path: Path) -> None:
    make_page(tmp_path / "run", ["a"]).close()
    opened(browser, (tmp_path / "run/gallery.html").as_uri())
    told = "document.querySelector('output').innerText"
    browser.run("document.querySelector('.plot').focus()")
    browser.key("ArrowLeft")
    browser.key("ArrowLeft")
    assert "step 300" in browser.run(told)
    assert "validation 0.3333" in browser.run(told)
    place = browser.run(
        "(element => { element.scrollIntoView(); const {x, y, width} = "
        "element.getBoundingClientRect(); return [x, y, width]; })"
        "(document.querySelector('.plot'))"
    )
    browser.mouse("mouseMoved", place[0] + place[2] / 2, place[1] + 20)
    assert "step 200" in browser.run(told)
    rate = browser.run("document.querySelectorAll('output')[1].innerText")
    assert "123.4" in rate, "of all charts"


def test_hostile_prompts_stay_text(browser: Tab, tmp_path: Path) -> None:
    output = tmp_path / HOSTILE.replace("/", "_")[:60]
    make_page(output, [HOSTILE], steps=2).close()
    text = opened(browser, (output / "gallery.html").as_uri())
    browser.run("document.querySelector('.strip a').click()")
    assert "<title>owned" not in text
    assert browser.run("document.title") != "owned"
    assert browser.run("document.scripts.length") == 1
    assert (
        browser.run("document.querySelectorAll('img:not([src^=data]):not(dialog img)').length") == 0
    )
    assert "onerror=alert(1)&gt;" in text
    assert browser.run("document.querySelector('h3').innerText") == HOSTILE


class _Attributes(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("link", "iframe", "object"), tag
        self.loaded += [value or "" for name, value in attrs if name == "src"]


def test_the_file_needs_nothing_else(tmp_path: Path) -> None:
    make_page(tmp_path / "run", ["a"]).close()
    text = (tmp_path / "run" / "gallery.html").read_text()
    parser = _Attributes()
    parser.feed(text)
    assert len(parser.loaded) == 4
    assert all(value.startswith("data:image/") for value in parser.loaded)
    assert "url(" not in text
    assert text.count("<script") == 1
    assert f"<script>{SCRIPT}</script>" in text, "our own, which the policy knows by its hash"
    assert "script-src 'sha256-" in text
    assert "https://" not in SCRIPT
    assert "default-src 'none'" in text


def test_many_steps_and_prompts_are_bounded(tmp_path: Path) -> None:
    pictures = Pictures(tmp_path / "samples")
    prompts = [f"prompt {n}" for n in range(MOST_PROMPTS + 3)]
    for step in range(1, 31):
        make_samples(tmp_path, step, prompts, (8, 8))
        pictures.add(step)
    assert len(pictures.shown_steps) <= MOST_STEPS
    assert pictures.shown_steps[0] == 1
    assert pictures.shown_steps[-1] == pictures.num_steps == 30
    rows = pictures.rows()
    assert len(rows) == MOST_PROMPTS
    assert all(all(row) for _, row in rows)


def test_ten_thousand_steps_are_evenly_thinned() -> None:
    history = History()
    for step in range(1, 10_001):
        history.add({"step": step, "train_loss": 2.0 - step / 10_000, "learning_rate": 1e-4})
    history.add({"step": 10_001, "train_loss": float("nan")})
    points = history.of("train_loss")
    assert 600 <= len(points) <= 1200
    assert points[-1][1] == pytest.approx(1.0, abs=0.01)
    gaps = {round(b - a) for (a, _), (b, _) in pairwise(points[:-1])}
    assert len(gaps) == 1, "the first steps are shown as well as the last"
    assert points[0][0] < 20
    assert (history.not_finite, history.first_not_finite) == (1, 10_001)
    assert sum(len(chart.html(10_001)) for chart in history.charts(1.2)) < 200_000


def test_repeated_steps_replace_what_followed() -> None:
    history = History()
    for step, loss in ((1, 4.0), (2, 3.0), (3, 9.0), (2, 2.0), (3, 1.0)):
        history.add({"step": step, "train_loss": loss})
        history.add({"step": step, "eval_loss": loss})
    assert history.of("train_loss") == history.of("eval_loss") == [(1, 4.0), (2, 2.0), (3, 1.0)]


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5], [1e-6, 1e3], [0.5861, 0.5864]])
def test_any_range_of_losses_is_drawn(values: list[float]) -> None:
    history = History()
    for index, value in enumerate(values):
        history.add({"step": index, "eval_loss": value})
    (chart,) = history.charts(None)
    drawing = chart.html(len(values) - 1)
    assert drawing.count('class="dot evaluation"') == len(values)
    assert "nan" not in drawing


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), None])
def test_values_that_cannot_be_drawn_are_left_out(value: float | None) -> None:
    history = History()
    names = ("train_loss", "grad_norm", "learning_rate", "samples_per_second")
    history.add({"step": 0, **dict.fromkeys(names, value)})
    page = render(Contents("run", charts=history.charts(None)))
    assert 'class="raw' not in page


def test_a_changed_prompt_has_a_row_of_its_own(tmp_path: Path) -> None:
    pictures = Pictures(tmp_path / "samples")
    for step, prompts in enumerate((["a", "b"], ["a", "c"], ["a"]), 1):
        make_samples(tmp_path, step, prompts, (8, 8))
        pictures.add(step)
    shutil.copytree(tmp_path / "samples/step_0000001", tmp_path / "samples/originals")
    pictures.add(1)
    texts = [
        [original and original.fields["prompt"], *(each and each.fields["prompt"] for each in row)]
        for original, row in pictures.rows()
    ]
    newest_first = [[None, None, "c", None], ["b", "b", None, None]]
    assert texts == [["a", "a", "a", "a"], *newest_first]


@pytest.mark.parametrize(
    ("count", "is_told"), [(MOST_PROMPTS // 2, False), (MOST_PROMPTS + 1, True)]
)
def test_changed_prompts_are_not_more_prompts(tmp_path: Path, count: int, is_told: bool) -> None:
    page = RunPage(resolve({"preset": "micro"}), tmp_path)
    for step, name in ((1, "before"), (2, "after")):
        prompts = [f"{name} {index}" for index in range(count)]
        page.show(step, make_samples(tmp_path, step, prompts, (8, 8)))
    text = (tmp_path / "gallery.html").read_text()
    assert f"before {count // 2}" in text
    assert f"after {count // 2}" in text
    assert (f"At most {MOST_PROMPTS} prompts are shown" in text) == is_told


def test_the_only_point_of_a_run_is_drawn() -> None:
    history = History()
    history.add({"step": 1, "train_loss": 0.5})
    assert history.charts(None)[0].html(1).count('class="dot smooth"') == 1
    history.add({"step": 2, "train_loss": 0.4})
    assert 'class="dot' not in history.charts(None)[0].html(2)


def test_damaged_images_leave_their_place_empty(tmp_path: Path) -> None:
    make_samples(tmp_path, 1, ["a", "b"], (8, 8))
    (tmp_path / "samples" / "step_0000001" / "00.png").write_bytes(b"\x89PNG cut off")
    pictures = Pictures(tmp_path / "samples")
    pictures.add(1)
    assert [picture is not None for _, (picture,) in pictures.rows()] == [True]


def test_names_that_are_no_text_are_shown_escaped() -> None:
    page = render(Contents("run", settings=[("output", "und\udcff")]))
    assert "und\\udcff" in page
    assert page.encode()


def test_the_page_is_served_as_the_run_goes_on(tmp_path: Path) -> None:
    times = [0.0]
    page = RunPage(resolve({"preset": "micro"}), tmp_path, now=lambda: times[0])
    with served(page=page.live, file=page.file) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert 'http-equiv="refresh"' in answer.read().decode()
        page.write(record(50))
        assert "50 of 100" not in get(port), "it is made once in two seconds"
        times[0] = 3.0
        assert "50 of 100" in get(port)
        page.status = "success"
        times[0] = 6.0
        assert 'http-equiv="refresh"' not in get(port)


def test_other_processes_serve_their_progress() -> None:
    progress = Progress()
    progress.update(step=3, steps=7)
    with served(progress) as port:
        text = get(port)
        assert "import" in text
        assert "<dd>3</dd>" in text
    assert json.dumps(progress.read())


def test_a_port_of_a_pod_is_forwarded_too() -> None:
    with served(address="127.0.0.2", port=free_port()) as port:
        assert get(port) == get(port, host="127.0.0.2")
    for address in ("127.0.0.1", "127.0.0.2"):
        with pytest.raises(OSError, match="refused"):
            get(port, host=address)


def test_a_loopback_port_that_is_taken_is_left_alone() -> None:
    second = Progress()
    second.update(rank=7)
    with served() as port, served(second, "127.0.0.2", port):
        assert "<dd>7</dd>" in get(port, host="127.0.0.2")
        assert "<dd>7</dd>" not in get(port)


def test_a_page_that_is_served_renews_itself(
    browser: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxtrain.report.page._REFRESH_SECONDS", 1)
    times = [0.0]
    page = RunPage(resolve({"preset": "micro"}), tmp_path / "run", now=lambda: times[0])
    page.show(16, make_samples(tmp_path / "run", 1, ["a"], (400, 400)))
    with served(page=page.live, file=page.file) as port:
        opened(browser, f"http://127.0.0.1:{port}/")
        browser.run("document.querySelector('.strip a').click()")
        browser.wait_for("document.querySelector('dialog img').naturalWidth === 400")
        page.write(record(50))
        page.show(800, make_samples(tmp_path / "run", 50, ["a"], (400, 400)))
        times[0] = 3.0
        time.sleep(5)
        count = "document.querySelectorAll('.strip a').length"
        assert browser.run(count) == 1, "it waits while an image is looked at"
        browser.key("Escape")
        browser.wait_for(f"{count} === 2")
        assert browser.refused == []
        for name in ("samples/../../x", "samples/step_0000050/01.png", "gallery.html"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(port, f"/{name}")


def test_runs_are_shown_side_by_side(browser: Tab, tmp_path: Path) -> None:
    runs = [tmp_path / name / "my run" for name in "ab"]
    for rate, run in enumerate(runs, 1):
        make_page(run, [HOSTILE, f"only of {rate}"], steps=rate).close()
        lines = [json.dumps(record(100 * step)) for step in range(1, 4)]
        (run / "metrics.jsonl").write_text("\n".join(lines))
        config = resolve({"preset": "micro", "optim": {"learning_rate": rate / 1000}})
        (run / "config.json").write_text(config.model_dump_json())
    compare_runs(runs, tmp_path / "both.html")
    text = opened(browser, (tmp_path / "both.html").as_uri())
    assert browser.run("document.querySelectorAll('article').length") == 3
    names = browser.run("[...document.querySelectorAll('figcaption')].map(e => e.innerText)")
    assert names[:2] == [f"{runs[0]} · step 100", f"{runs[1]} · step 200"]
    assert "optim.learning_rate" in text
    assert "schedule.steps" not in text, "it is equal"
    browser.run("document.querySelector('.strip a').click()")
    browser.wait_for("document.querySelector('dialog img').naturalWidth === 96")
    with pytest.raises(ConfigError, match="give the output folder of a run"):
        compare_runs([tmp_path], tmp_path / "none.html")
    (runs[0] / "metrics.jsonl").write_text(json.dumps({"step": "x"}))
    compare_runs(runs, tmp_path / "both.html")
    for output, says in (
        (runs[0] / "gallery.html", "is the page of one run"),
        (runs[0] / "config.json", "exists, and is no page"),
        (tmp_path, "exists, and is no page"),
    ):
        with pytest.raises(ConfigError, match=says):
            compare_runs(runs, output)
    with pytest.raises(StorageError, match="cannot be written"):
        compare_runs(runs, tmp_path / "missing/both.html")
