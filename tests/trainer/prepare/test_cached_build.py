"""Cached builds: kept until their settings change, and replaced only by a complete result."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from fluxtrain.prepare.openmoji import build_cached, is_cached
from fluxtrain.runtime.progress_bar import Advance


def build_file(
    output: Path, settings: dict[str, object], fail: bool = False, force: bool = False
) -> str:
    """Build ``output``; return what was logged."""

    def build(partial: Path, advance: Advance) -> None:
        partial.write_text("half")
        if fail:
            raise RuntimeError("power failure")
        partial.write_text(f"built with {settings}")
        advance(1)

    log = io.StringIO()
    build_cached("work", output, settings, 1, build, force, stream=log)
    return log.getvalue()


def test_a_result_is_kept_until_its_settings_change(tmp_path: Path) -> None:
    output = tmp_path / "folder" / "result"
    assert "already" not in build_file(output, {"size": 1})
    assert build_file(output, {"size": 1}) == "work: already made\n"
    assert "already" not in build_file(output, {"size": 2})
    assert "already" not in build_file(output, {"size": 2}, force=True)
    assert output.read_text() == "built with {'size': 2}"


def test_a_failed_build_leaves_the_earlier_result(tmp_path: Path) -> None:
    output = tmp_path / "result"
    build_file(output, {"size": 1})
    with pytest.raises(RuntimeError):
        build_file(output, {"size": 2}, fail=True)
    assert output.read_text() == "built with {'size': 1}"
    assert is_cached(output, {"size": 1})
    assert "already" not in build_file(output, {"size": 2})


def test_a_malformed_settings_file_is_no_cached_result(tmp_path: Path) -> None:
    output = tmp_path / "result"
    build_file(output, {"size": 1})
    (tmp_path / "result.prepared.json").write_text("{")
    assert not is_cached(output, {"size": 1})
