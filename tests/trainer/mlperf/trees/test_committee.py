"""The review of several results: a table, findings of each, JSON, a page, and what they cost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.trainer.mlperf.trees.submitters import SUBMITTERS, log, write_result, write_tree

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from fluxtrain.mlperf.log_lines import TOKEN
from fluxtrain.mlperf.review.tree import find
from fluxtrain.mlperf.review.verdict import Verdict, judge

pytestmark = pytest.mark.slow

HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(2)'>\"&\x1b[31m"
VOID = {"meta", "br", "img", "line", "polyline", "path"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    write_tree(root, (2, 1, 1, 1, 1))
    return root


def test_honest_results_have_no_finding_and_at_most_one_note(repository: Path) -> None:
    verdicts = list(judge(find([repository]).places, None))
    assert {each.row[0] for each in verdicts} == set(SUBMITTERS)
    for each in verdicts:
        assert not each.findings
        assert len(each.notes) <= 1
        assert each.row[2:8] == ("closed", "6.0.0", "28.47", "7,438,336", "10/10", "accepted")


def test_several_results_are_a_table_with_the_findings_of_each_below(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, evaluations in (("fast", [20] * 10), ("few", [27, 28])):
        write_result(tmp_path / "Thorn", name, 77_000, evaluations, code=None)
    code = main(["mlperf", "review", str(repository / "closed/Alder"), str(tmp_path / "Thorn")])
    assert code == EXIT_ERROR
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FAILED: 4 findings in 32 logs"
    heading = lines[1].split()
    assert heading[:5] == ["ORGANISATION", "SYSTEM", "DIVISION", "RULESET", "MINUTES"]
    rows = {tuple(line.split()[:2]): line.split()[4:] for line in lines[2:6]}
    assert rows["Alder", "box.n1"] == ["28.47", "7,438,336", "10/10", "accepted", "0", "0"]
    assert rows["Thorn", "fast"] == ["20.07", "5,242,880", "10/10", "refused", "2", "1"]
    assert rows["Thorn", "few"] == ["-", "-", "2/2", "-", "2", "0"]
    below = lines.index("Thorn/few: 2 logs, description yes, code none")
    assert "ten-runs" in "\n".join(lines[below:])
    assert "ten-runs" not in "\n".join(lines[:below])


def test_a_waiver_of_one_result_is_not_of_the_others(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    for number, name in enumerate(("one", "two")):
        write_result(tmp_path / "Thorn", name, 77_000 + 1000 * number, [20] * 10)
    code = tmp_path / "Thorn/benchmarks/flux1/implementations/one_pytorch"
    (code / "waivers.json").write_text('{"converges-as-the-reference": "a reason"}')
    output = mlperf(EXIT_ERROR, "review", tmp_path)
    assert output.startswith("FAILED: 1 finding in 20 logs")
    assert "waived by the submitter: 1 finding" in output


def test_advice_on_code_names_our_command_for_our_packages_only(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    write_result(tmp_path / "Thorn", "box", code=None)
    output = mlperf(EXIT_ERROR, "review", tmp_path)
    assert "code none" in output
    assert "code-is-enclosed" in output
    assert "fluxtrain" not in output.split("code-is-enclosed")[1].splitlines()[0]


def test_json_has_the_row_of_each_result_and_whose_each_finding_is(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    folder = write_result(tmp_path / "Thorn", "box", evaluations=[27, 28])
    told = json.loads(mlperf(EXIT_ERROR, "review", folder, "--json"))
    assert told["results"][0]["row"]["converged"] == "2/2"
    assert {each["result"] for each in told["findings"]} == {str(folder)}


class Tags(HTMLParser):
    """The tags of a page, which must be balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.seen = list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_shows_each_result_and_escapes_what_logs_say(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mlperf: Callable[..., str]
) -> None:
    folder = write_result(tmp_path / "Th<b>orn", "box", 77_000)
    for number, path in enumerate(folder.iterdir()):
        events = log("Th<b>orn", HOSTILE, 77_000 + number, 20)
        for event in events:
            if event["key"] in ("submission_division", "seed", "target_accuracy"):
                event["value"] = HOSTILE.replace("/", "") if number else event["value"]
        path.write_text("".join(f"{TOKEN}{json.dumps(event)}\n" for event in events))
    (folder / "result_0.txt").rename(folder / "result_<i>0.txt")
    page = tmp_path / "page.html"
    paths = [str(repository), str(tmp_path)]
    assert "\x1b" not in mlperf(EXIT_ERROR, "review", *paths, "--html", page)
    tags = Tags()
    tags.feed(text := page.read_text())
    assert tags.open == []
    assert tags.seen.count("section") == tags.seen.count("svg") == 7
    assert (tags.seen.count("script"), "img" in tags.seen, "b" in tags.seen) == (1, False, False)
    assert "mean of the reference" in text
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
    assert "same-submission" in text
    page.unlink()
    page.mkdir()
    code = main(["mlperf", "review", str(repository / "Elder"), "--html", str(page)])
    assert code not in (EXIT_OK, EXIT_ERROR)
    assert "cannot be written" in capsys.readouterr().err


def test_a_result_that_cannot_be_read_is_a_finding_and_hides_no_other(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    for system in ("one", "two"):
        write_result(tmp_path / "Thorn", system, 77_000 + (system == "two"))
    (tmp_path / "Thorn/systems/two.json").write_text("{")
    page = tmp_path / "page.html"
    out = mlperf(EXIT_ERROR, "review", tmp_path, "--html", page)
    assert out.startswith("FAILED: 1 finding in 10 logs")
    assert "two.json: is not JSON" in out
    assert "two.json: is not JSON" in page.read_text()
    assert "ruleset 6.0.0" in out
    (tmp_path / "Thorn/results/two/flux1/result_0.txt").write_text("")
    assert main(["mlperf", "review", str(tmp_path / "Thorn/results/two")]) == EXIT_USAGE


def test_runs_of_another_result_are_found_and_a_copied_part_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mlperf: Callable[..., str]
) -> None:
    folder = write_result(tmp_path / "Thorn", "one", 77_000)
    shutil.copytree(tmp_path / "Thorn", tmp_path / "Rose")
    found = json.loads(mlperf(EXIT_ERROR, "review", "--json", tmp_path))["findings"]
    (text,) = (each["text"] for each in found if each["rule"] == "runs-are-different-runs")
    assert text.startswith("10 runs, such as result_0.txt, with the losses of runs of ")
    first, second = (folder / f"result_{number}.txt" for number in (0, 3))
    losses = re.findall(r'"eval_accuracy", "value": ([\d.]+)', second.read_text())
    parts = re.split(r'(?<="eval_accuracy", "value": )[\d.]+', first.read_text())
    texts = zip(parts, [*losses[: len(parts) - 2], "0.5859", ""], strict=True)
    first.write_text("".join(text + loss for text, loss in texts))
    main(["mlperf", "review", str(folder)])
    assert "curves-are-of-their-own" in capsys.readouterr().out


def test_what_is_not_there_and_what_is_too_many_are_said(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    assert mlperf(EXIT_USAGE, "review", tmp_path / "nothing").rstrip().endswith("does not exist")
    folder = write_result(tmp_path / "Thorn", "one", 77_000, [28] * 12)
    assert "12 runs; needed: 10, the consecutive ones with" in mlperf(EXIT_ERROR, "review", folder)


def test_a_page_replaces_pages_only(tmp_path: Path, mlperf: Callable[..., str]) -> None:
    log = write_result(tmp_path / "Thorn", "one", 77_000) / "result_0.txt"
    text = log.read_text()
    assert "no review has written" in mlperf(EXIT_USAGE, "review", log, "--html", log)
    assert log.read_text() == text
    page = str(tmp_path / "page.html")
    codes = [main(["mlperf", "review", str(log), "--html", page]) for _ in range(2)]
    assert codes[0] == codes[1] != EXIT_USAGE


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("submission_org", None, "names-are-filled-in"),
        ("submission_platform", "YOUR_SYSTEM_HERE", "names-are-filled-in"),
        ("number_of_nodes", "four", "number_of_nodes is 'four' in the description"),
        ("accelerators_per_node", "eight", "accelerators_per_node is 'eight' in the description"),
        ("folder", "open", "the folder is of the division open, the logs are of 'closed'"),
    ],
)
def test_what_is_stated_nowhere_or_otherwise_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: str | None, said: str
) -> None:
    folder = write_result(tmp_path / "closed/Thorn", "one", 77_000)
    if key == "folder":
        (tmp_path / "closed").rename(tmp_path / "open")
    elif not key.startswith("submission"):
        path = tmp_path / "closed/Thorn/systems/one.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    else:
        for log in folder.iterdir():
            old = rf'("key": "{key}", "value": )"[^"]*"'
            log.write_text(re.sub(old, lambda m: m[1] + json.dumps(value), log.read_text()))
    main(["mlperf", "review", str(tmp_path)])
    assert capsys.readouterr().out.count(said) == 1


def test_the_logs_of_a_result_are_gone_after_its_verdict(repository: Path) -> None:
    (verdict,) = judge(find([repository / "Elder"]).places, None)
    assert isinstance(verdict, Verdict)
    assert len(verdict.curves) == 10
    assert all(len(points) == int(points[-1][0] // 262_144) for _, points in verdict.curves)


def test_a_review_does_not_load_torch() -> None:
    code = "import sys, fluxtrain.mlperf.review.committee; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
