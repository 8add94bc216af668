"""tests/run.py: a test that fails once is reported, and only one that then passes is forgiven."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import run

pytestmark = pytest.mark.slow  # each test starts two or more pytest processes

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
OPTIONS = ["--import-mode=importlib"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a project with a compute and a cluster test that both pass."""
    for lane in ("compute", "cluster"):
        (tmp_path / "tests" / lane).mkdir(parents=True)
        (tmp_path / "tests" / lane / "test_good.py").write_text("def test_good(): pass")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "LANES", {"compute": ["compute"], "cluster": ["cluster"]})
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing them takes a second
    return tmp_path


@pytest.fixture
def cluster_only(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of the project without its compute test."""
    monkeypatch.setattr(run, "LANES", {"cluster": ["cluster"]})
    return project


def write(project: Path, lane: str, *then: str) -> None:
    for number, text in enumerate(then):
        path = project / "tests" / lane / f"test_first_{number}.py"
        path.write_text(FIRST_FAILS.format(then=text))


def test_all_pass_and_nothing_is_repeated(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--repeat", *OPTIONS]) == 0
    lines = capfd.readouterr().out
    assert "cluster: 1 passed, exit code 0" in lines
    assert "0 flaky" in lines.splitlines()[-1]


def test_a_folder_inside_another_runs_in_its_own_process_only(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inside = project / "tests" / "compute" / "agents"
    inside.mkdir()
    (inside / "test_more.py").write_text("def test_more(): pass")
    monkeypatch.setattr(run, "LANES", {"compute": ["compute"], "cluster": ["compute/agents"]})
    assert run.main(OPTIONS) == 0
    lines = capfd.readouterr().out
    assert "compute: 1 passed, exit code 0" in lines
    assert "cluster: 1 passed, exit code 0" in lines


def test_a_cluster_test_that_then_passes_is_flaky_with_both_logs(
    cluster_only: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(cluster_only, "cluster", "pass")
    assert run.main(["--repeat", *OPTIONS]) == 0
    lines = capfd.readouterr().out
    report = lines[lines.index("FLAKY") :]
    for text in ("the first error", "first output", "second output"):
        assert text in report
    assert "cluster: 2 passed, exit code 0" in report
    assert "1 flaky" in lines.splitlines()[-1]


def test_a_cluster_test_that_does_not_pass_the_second_time_fails(
    cluster_only: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(cluster_only, "cluster", "raise AssertionError", "pytest.skip('no cluster')")
    assert run.main(["--repeat", *OPTIONS]) == 1
    lines = capfd.readouterr().out
    assert "FLAKY" not in lines
    assert "2 failed, 1 passed" in lines


def test_the_last_lines_name_the_failed_tests_with_their_errors_and_the_flaky_ones(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(project, "compute", "pass", "assert [1, 2] == [1]")
    assert run.main(["--repeat", *OPTIONS]) == 1
    end = capfd.readouterr().out.splitlines()[-3:]
    assert end[0].startswith(
        "FAILED tests.compute.test_first_1::test_it: AssertionError: the first"
    )
    assert end[1] == "FLAKY tests.compute.test_first_0::test_it"
    assert "1 flaky" in end[2]


def test_an_expected_failure_is_counted_by_its_name(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    kinds = ("pytest.xfail", "pytest.skip")
    cases = "".join(
        f'<testcase name="{kind}"><skipped type="{kind}"/></testcase>' for kind in kinds
    )
    report.write_text(f"<testsuite>{cases}</testsuite>")
    result = run.Result(0)
    run.read(report, result)
    assert list(result.outcomes.values()) == ["xfailed", "skipped"]


def test_without_the_option_nothing_is_repeated(cluster_only: Path) -> None:
    write(cluster_only, "cluster", "pass")
    assert run.main(OPTIONS) == 1


def test_a_lane_that_cannot_be_collected_fails(cluster_only: Path) -> None:
    broken = cluster_only / "tests" / "cluster" / "test_broken.py"
    broken.write_text("import missing_module")
    assert run.main(["--repeat", *OPTIONS]) == 1


def test_options_that_select_nothing_in_one_lane_pass(project: Path) -> None:
    (project / "tests" / "compute" / "test_only.py").write_text("def test_only(): pass")
    assert run.main(["-k", "only", *OPTIONS]) == 0
