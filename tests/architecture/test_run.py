"""tests/run.py: each test runs once; a failure is reported, and only a test that then passes is forgiven."""

from __future__ import annotations

import shlex
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests import conftest, run
from tests.paths import ROOT

SUITES = dict(run.SUITES)
TESTS = sorted(path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py"))
slow = pytest.mark.slow  # starts two or more pytest processes

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
OPTIONS = ["--import-mode=importlib", "-p", "xdist", "--numprocesses=2"]


def use_folders(monkeypatch: pytest.MonkeyPatch, *folders: str) -> None:
    for name, suite in SUITES.items():
        monkeypatch.setitem(run.SUITES, name, replace(suite, folders=folders, commands=()))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a project with a test in each of two folders; both pass."""
    for folder in ("compute", "cluster"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / "test_good.py").write_text(f"def test_{folder}(): pass")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    use_folders(monkeypatch, "compute", "cluster")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing them takes a second
    return tmp_path


def write(project: Path, *then: str) -> None:
    for number, text in enumerate(then):
        path = project / "tests" / "cluster" / f"test_first_{number}.py"
        path.write_text(FIRST_FAILS.format(then=text))


@pytest.mark.parametrize("name", ["test", "proof"])
def test_a_suite_has_every_folder(name: str) -> None:
    folders = Counter(path.parts[0] for path in TESTS)
    assert Counter(SUITES[name].folders) == dict.fromkeys(folders, 1)


def test_a_worker_has_all_of_a_folder_and_one_has_all_clusters() -> None:
    for path in TESTS:
        unit = conftest.unit_of(f"tests/{path}::test_it[a::b/c]")
        assert unit == run.KUBERNETES.get(path.parts[0], f"tests/{path.parent}")


def test_a_test_is_in_one_suite() -> None:
    assert SUITES["test"].marks == f"not {SUITES['proof'].marks}"
    assert SUITES["quick"].marks == f"not slow and not trains and {SUITES['test'].marks}"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    assert "-m" not in settings["ini_options"]["addopts"].split(), "it would be in neither"
    assert SUITES["all"] == replace(SUITES["test"], marks="proof or not proof")
    ci = (ROOT / ".ci/run").read_text().replace("\\\n", "")
    commands = [shlex.split(line, comments=True) for line in ci.splitlines()]
    setup, others, tests = (command for command in commands if command[:1] == ["make"])
    assert setup == ["make", "setup", "TORCH=cuda"]
    proof = {word for command in SUITES["proof"].commands for word in command}
    assert {word for word in others[1:] if not word.startswith("-")} == {
        "check",
        "prepare-cluster",
        *proof,
    }
    assert tests[:3] == ["make", "test", "SUITE=all"]
    options = tests[3].removeprefix("PYTEST_OPTIONS=").split()
    assert options[:2] == ["--repeat", "--fail-on-skip"]
    ignored = [option.removeprefix("--ignore=") for option in options[2:]]
    assert f"pytest -q {' '.join(ignored)}\n" in (ROOT / "Makefile").read_text(), "of make check"


@slow
def test_what_is_marked_runs_in_the_proof_and_all_else_in_the_test(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    proof: long\n    slow: slow\n    trains: trains\n"
    )
    marked = "import pytest\n@pytest.mark.proof\ndef test_long(): pass\ndef test_short(): pass\n"
    (project / "tests" / "compute" / "test_marked.py").write_text(marked)
    for name, expected in (("test", "3 passed"), ("proof", "1 passed")):
        assert run.main([name, *OPTIONS]) == 0
        assert f"{expected}, exit code 0" in capfd.readouterr().out


def test_a_target_of_make_that_fails_fails_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "Makefile").write_text("good bad:\n\t@echo $@ $(TORCH); test $@ = good\n")
    commands = (("bad", "TORCH=2.9.0 2.11"), ("good",))
    monkeypatch.setitem(run.SUITES, "proof", run.Suite("no_such_mark", ["compute"], commands))
    monkeypatch.setenv("TORCH", "that of a Make around this")
    assert run.main(["proof", "-k", "no_such", *OPTIONS]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert {"bad 2.9.0 2.11", "good"} <= {line.strip() for line in lines}
    assert lines[-2] == "FAILED make bad: exit code 2"


@slow
def test_all_pass_and_nothing_is_repeated(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(["test", "--repeat", *OPTIONS]) == 0
    lines = capfd.readouterr().out
    assert "2 passed, exit code 0" in lines
    assert "0 flaky" in lines.splitlines()[-1]


@slow
def test_a_cluster_test_that_then_passes_is_flaky_with_both_logs(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(project, "pass")
    assert run.main(["test", "--repeat", *OPTIONS]) == 0
    lines = capfd.readouterr().out
    report = lines[lines.index("FLAKY") :]
    for text in ("the first error", "first output", "second output"):
        assert text in report
    assert "3 passed, exit code 0" in report
    assert "1 flaky" in lines.splitlines()[-1]


@slow
def test_a_skipped_test_fails_the_run_that_asks_for_it_although_a_flaky_one_passed(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write(project, "pass")
    skips = "import pytest\ndef test_it(): pytest.skip('a program is missing')"
    (project / "tests" / "compute" / "test_skips.py").write_text(skips)
    (project / "conftest.py").write_text(Path(conftest.__file__).read_text())
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the conftest's own imports
    assert run.main(["test", "--repeat", *OPTIONS, "--fail-on-skip"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert "1 flaky" in lines[-1]
    assert lines[-2].startswith("SKIPPED tests.compute.test_skips::test_it: ")
    assert lines[-2].endswith("a program is missing")


@slow
def test_a_cluster_test_that_does_not_pass_the_second_time_fails(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(project, "raise AssertionError", "pytest.skip('no cluster')")
    assert run.main(["test", "--repeat", *OPTIONS]) == 1
    lines = capfd.readouterr().out
    assert "FLAKY" not in lines
    assert "2 failed, 2 passed" in lines


@slow
def test_the_last_lines_name_the_failed_tests_with_their_errors_and_the_flaky_ones(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(project, "pass", "assert [1, 2] == [1]")
    assert run.main(["test", "--repeat", *OPTIONS]) == 1
    end = capfd.readouterr().out.splitlines()[-3:]
    assert end[0].startswith(
        "FAILED tests.cluster.test_first_1::test_it: AssertionError: the first"
    )
    assert end[1] == "FLAKY tests.cluster.test_first_0::test_it"
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


@slow
def test_without_the_option_nothing_is_repeated(project: Path) -> None:
    write(project, "pass")
    assert run.main(["test", *OPTIONS]) == 1


@slow
def test_a_file_that_cannot_be_collected_fails(project: Path) -> None:
    broken = project / "tests" / "cluster" / "test_broken.py"
    broken.write_text("import missing_module")
    assert run.main(["test", "--repeat", *OPTIONS]) == 1


def test_options_that_select_nothing_pass(project: Path) -> None:
    assert run.main(["test", "-k", "no_such", *OPTIONS]) == 0
