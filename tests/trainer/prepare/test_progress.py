"""Progress without a terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from fluxtrain.runtime import progress_bar as progress
from fluxtrain.runtime.progress_bar import ProgressBar


def test_without_a_terminal_a_line_is_logged_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 1.0, 12.0, 12.5, 13.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    stream, reported = io.StringIO(), list[tuple[int, int]]()
    with ProgressBar(
        "clean", 2000, stream, on_progress=lambda *counts: reported.append(counts)
    ) as bar:
        for _ in range(3):
            bar.advance(500)
    assert stream.getvalue() == "clean 1,000/2,000  80.0/s  12 s left\n"
    assert reported == [(500, 2000), (1000, 2000), (1500, 2000)]


def test_more_than_was_expected_leaves_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 12.0, 12.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    stream = io.StringIO()
    with ProgressBar("clean", 100, stream) as bar:
        bar.advance(120)
    assert stream.getvalue() == "clean 120/100  10.0/s  0 s left\n"
