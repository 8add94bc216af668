"""gallery.html in a real browser: everything is there, nothing is asked of the network, prompts stay text."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cluster.packages import ensure_programs, program
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.report.endpoint import serve
from fluxtrain.report.gallery import (
    MOST_PROMPTS,
    MOST_STEPS,
    Contents,
    Losses,
    Pictures,
    RunPage,
    render,
)
from fluxtrain.runtime.progress import Progress

BROWSER = "chromium-headless-shell"
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
    """Return the page of a run with images of ``prompts`` at ``steps`` steps."""
    page = RunPage(resolve({"preset": "micro", "schedule": {"steps": 1000}}), output)
    for step in range(1, steps + 1):
        page.write(record(100 * step))
        page.write({"step": 100 * step, "samples": 1600 * step, "eval_loss": 1.0 / step})
        page.show(1600 * step, make_samples(output, 100 * step, prompts, (96, 64)))
    return page


@pytest.fixture(scope="module")
def browser() -> str:
    """Return Debian's Chromium without a window, which is installed if it is missing."""
    ensure_programs({BROWSER: BROWSER})
    return program(BROWSER)


def opened(browser: str, address: str, folder: Path, *options: str) -> str:
    """Open ``address``; return the document after scripts have run, as the browser has it."""
    command = [browser, "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    arguments = ["--window-size=1200,1400", "--virtual-time-budget=2000", *options, "--dump-dom"]
    done = subprocess.run(
        [*command, *arguments, address], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def test_a_browser_shows_the_samples_and_the_curve(browser: str, tmp_path: Path) -> None:
    output = tmp_path / "style"
    make_page(output, ["a red heart", "a house"]).close()
    address = (output / "gallery.html").as_uri()
    text = opened(browser, address, tmp_path)
    assert "a red heart" in text
    assert [f"step {step}" in text for step in (100, 200, 300, 400)] == [True] * 4
    assert "<polyline" in text
    picture = tmp_path / "page.png"
    opened(browser, address, tmp_path, f"--screenshot={picture}")
    with Image.open(picture) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    near = [each for each in colours if abs(each[1] - 144) < 6 and abs(each[2] - 128) < 6]
    assert near, "the samples of step 400 are drawn"


def test_hostile_prompts_stay_text(browser: str, tmp_path: Path) -> None:
    output = tmp_path / HOSTILE.replace("/", "_")[:60]
    make_page(output, [HOSTILE], steps=1).close()
    text = opened(browser, (output / "gallery.html").as_uri(), tmp_path)
    assert "<title>owned" not in text
    assert "<script" not in text
    assert "onerror=alert(1)&gt;" in text


class _Attributes(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "object"), tag
        self.loaded += [value or "" for name, value in attrs if name == "src"]


def test_the_file_needs_nothing_else(tmp_path: Path) -> None:
    make_page(tmp_path / "run", ["a"]).close()
    text = (tmp_path / "run" / "gallery.html").read_text()
    parser = _Attributes()
    parser.feed(text)
    assert len(parser.loaded) == 4
    assert all(value.startswith("data:image/") for value in parser.loaded)
    assert "url(" not in text
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
    losses = Losses()
    for step in range(10_000):
        losses.add({"samples": step, "train_loss": 2.0 - step / 10_000})
    losses.add({"samples": 10_000, "train_loss": float("nan")})
    assert 600 <= len(losses.training) <= 1200
    assert losses.training[-1][1] == pytest.approx(1.0, abs=0.01)
    assert len(losses.draw(1.2)) < 60_000


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5], [1e-6, 1e3], [0.5861, 0.5864]])
def test_any_range_of_losses_is_drawn(values: list[float]) -> None:
    losses = Losses()
    for index, value in enumerate(values):
        losses.add({"samples": index, "eval_loss": value})
    drawing = losses.draw(None)
    assert drawing.count("<circle") == len(values)
    assert "nan" not in drawing


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
    assert texts == [["a", "a", "a", "a"], ["b", "b", None, None], [None, None, "c", None]]


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
    losses = Losses()
    losses.add({"samples": 8, "train_loss": 0.5})
    assert losses.draw(None).count('<circle class="smooth"') == 1
    losses.add({"samples": 16, "train_loss": 0.4})
    assert "<circle" not in losses.draw(None)


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
    progress = Progress()
    stop = serve_page(page, progress)
    try:
        address = f"http://127.0.0.1:{progress.read()['port']}/"
        with urllib.request.urlopen(address) as answer:
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert 'http-equiv="refresh"' in answer.read().decode()
        page.write(record(50))
        assert "50 of 100" not in get(address), "it is made once in two seconds"
        times[0] = 3.0
        assert "50 of 100" in get(address)
        page.status = "success"
        times[0] = 6.0
        assert 'http-equiv="refresh"' not in get(address)
    finally:
        stop()


def serve_page(page: RunPage, progress: Progress) -> Any:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    return serve(registry, progress, "127.0.0.1", None, lambda: page.live(progress.read()))


def get(address: str) -> str:
    with urllib.request.urlopen(address) as answer:
        text: str = answer.read().decode()
        return text


def test_other_processes_serve_their_progress(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry

    progress = Progress()
    progress.update(step=3, steps=7)
    stop = serve(CollectorRegistry(), progress, "127.0.0.1", None)
    assert stop is not None
    try:
        text = get(f"http://127.0.0.1:{progress.read()['port']}/")
        assert "import" in text
        assert "<dd>3</dd>" in text
    finally:
        stop()
    assert json.dumps(progress.read())


def test_a_port_of_a_pod_is_forwarded_too() -> None:
    from prometheus_client import CollectorRegistry

    progress = Progress()
    stop = serve(CollectorRegistry(), progress, "127.0.0.2", None)
    assert stop is not None
    port = progress.read()["port"]
    try:
        assert get(f"http://127.0.0.1:{port}/") == get(f"http://127.0.0.2:{port}/")
    finally:
        stop()
    for address in ("127.0.0.1", "127.0.0.2"):
        with pytest.raises(OSError, match="refused"):
            get(f"http://{address}:{port}/")


def test_a_loopback_port_that_is_taken_is_left_alone() -> None:
    from prometheus_client import CollectorRegistry

    registry, first, second = CollectorRegistry(), Progress(), Progress()
    stops = [serve(registry, first, "127.0.0.1", None)]
    port = first.read()["port"]
    stops.append(serve(registry, second, "127.0.0.2", port))
    second.update(rank=7)
    try:
        assert "<dd>7</dd>" in get(f"http://127.0.0.2:{port}/")
        assert "<dd>7</dd>" not in get(f"http://127.0.0.1:{port}/")
    finally:
        for stop in stops:
            assert stop is not None
            stop()
