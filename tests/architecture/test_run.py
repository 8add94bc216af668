"""tests/run.py: a test that fails once is reported, and only one that then passes is forgiven."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import run

FIRST_FAILS = """
import pytest
from pathlib import Path

def test_it():
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        print("first output")
        raise AssertionError("the first error")
    print("second output")
    {then}
"""
PASSES = "def test_good(): pass"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a project with a compute and a cluster test that both pass."""
    for lane in ("compute", "cluster"):
        (tmp_path / "tests" / lane).mkdir(parents=True)
        (tmp_path / "tests" / lane / "test_good.py").write_text(PASSES)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "LANES", {"compute": ["compute"], "cluster": ["cluster"]})
    return tmp_path


def write(project: Path, lane: str, then: str) -> None:
    (project / "tests" / lane / "test_first.py").write_text(FIRST_FAILS.format(then=then))


OPTIONS = ["--import-mode=importlib"]


def test_all_pass_and_nothing_is_repeated(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--repeat", *OPTIONS]) == 0
    lines = capfd.readouterr().out
    assert "cluster: 1 passed, exit code 0" in lines
    assert "0 flaky" in lines.splitlines()[-1]


def test_a_cluster_test_that_then_passes_is_flaky_with_both_logs(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(project, "cluster", then="pass")
    assert run.main(["--repeat", *OPTIONS]) == 0
    lines = capfd.readouterr().out
    report = lines[lines.index("FLAKY") :]
    for text in ("the first error", "first output", "second output"):
        assert text in report
    assert "cluster: 2 passed, exit code 0" in report
    assert "1 flaky" in lines.splitlines()[-1]


@pytest.mark.parametrize("then", ["raise AssertionError", "pytest.skip('no cluster')"])
def test_a_cluster_test_that_does_not_pass_the_second_time_fails(
    project: Path, capfd: pytest.CaptureFixture[str], then: str
) -> None:
    write(project, "cluster", then=then)
    assert run.main(["--repeat", *OPTIONS]) == 1
    lines = capfd.readouterr().out
    assert "FLAKY" not in lines
    assert "1 failed, 1 passed" in lines


@pytest.mark.parametrize(("lane", "options"), [("compute", ["--repeat"]), ("cluster", [])])
def test_other_failures_are_not_repeated(project: Path, lane: str, options: list[str]) -> None:
    write(project, lane, then="pass")
    assert run.main([*options, *OPTIONS]) == 1


def test_a_lane_that_cannot_be_collected_fails(project: Path) -> None:
    (project / "tests" / "cluster" / "test_broken.py").write_text("import missing_module")
    assert run.main(["--repeat", *OPTIONS]) == 1


def test_options_that_select_nothing_in_one_lane_pass(project: Path) -> None:
    (project / "tests" / "compute" / "test_only.py").write_text("def test_only(): pass")
    assert run.main(["-k", "only", *OPTIONS]) == 0
