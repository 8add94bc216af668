"""Notes on what published logs never show, and the three kinds of what a review says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.trainer.mlperf.good_run import (
    CONVERGED,
    Evidence,
    good_run,
    loss_after,
    published,
    write_log,
)

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_ERROR, EXIT_OK
from fluxtrain.mlperf.evidence import Result
from fluxtrain.mlperf.review import plausibility
from fluxtrain.mlperf.review.result_rules import Finding
from fluxtrain.mlperf.review.review import RULES, result_findings, rule_findings

Break = Callable[[Evidence], object]
HOUR = 3_600_000


def shift(run: Evidence, first: int, milliseconds: int) -> None:
    """Move all events from an index on."""
    for event in run.events[first:]:
        event["time_ms"] += milliseconds


def a_block_in_no_time(run: Evidence) -> None:
    shift(run, run.at("block_start", 5) + 1, -57_200)


def a_clock_at_half_speed(run: Evidence) -> None:
    start = run.one("run_start")["time_ms"]
    for event in run.events[run.at("run_start") :]:
        event["time_ms"] = start + (event["time_ms"] - start) // 2


def evaluations_in_a_second(run: Evidence) -> None:
    for number in range(len(run.all("eval_start"))):
        shift(run, run.at("eval_accuracy", number), -1_200)
    for event in run.all("tracked_stats"):
        if "validation_time" in event["value"]:
            event["value"]["validation_time"] = 1.0


def blocks_in_half_the_time(run: Evidence) -> None:
    for number in range(len(run.all("block_start"))):
        shift(run, run.at("block_start", number) + 1, -29_000)


def a_clock_without_its_measures(run: Evidence) -> None:
    """One evaluation's own time is removed, and the rest halved."""
    run.events.remove(run.all("tracked_stats")[2])
    a_clock_at_half_speed(run)


def trained_before(run: Evidence) -> None:
    """The first losses are those of a model that has been trained for 40 evaluations."""
    for number, event in enumerate(run.all("eval_accuracy")[:-1]):
        event["value"] = loss_after(number + 40)


def a_last_loss_that_falls(run: Evidence) -> None:
    for event in run.all("eval_accuracy")[:-1]:
        event["value"] += 0.003


def equal_losses(run: Evidence) -> None:
    for number in range(5, 20):
        run.one("eval_accuracy", number)["value"] = 0.6123


def steps(seconds: float) -> Break:
    """Let the run measure the time of its steps; the true one is 58 s / 512."""

    def change(run: Evidence) -> None:
        run.one("tracked_stats", 1)["value"] = {"train_step_time": seconds}

    return change


def named(key: str, text: str) -> Break:
    return lambda run: run.one(key).update(value=text)


IMPLAUSIBLE_RUNS: list[tuple[str, Break, str]] = [
    ("a block in 0.8 s", a_block_in_no_time, "blocks-take-their-time"),
    ("a clock at half speed", a_clock_at_half_speed, "evaluations-are-as-measured"),
    ("evaluations in a second", evaluations_in_a_second, "evaluations-take-their-time"),
    ("steps twice as slow as the blocks", steps(0.23), "clock-is-of-the-steps"),
    ("blocks in half the time", blocks_in_half_the_time, "evaluations-take-their-time"),
    ("without one measure", a_clock_without_its_measures, "evaluations-are-as-measured"),
    ("weights that were trained before", trained_before, "losses-begin-untrained"),
    ("a last loss that falls", a_last_loss_that_falls, "target-is-reached-by-steps"),
    ("fifteen equal losses", equal_losses, "losses-change"),
    (
        "an organisation",
        named("submission_org", "SUBMISSION_ORG_PLACEHOLDER"),
        "names-are-filled-in",
    ),
    ("a platform", named("submission_platform", "4x<platform>"), "names-are-filled-in"),
]


def stranger(size: int = 512, evaluations: int = 27) -> Evidence:
    return Evidence(list(published(size, evaluations)), {})


@pytest.mark.parametrize(
    ("what", "change", "rule"), IMPLAUSIBLE_RUNS, ids=[row[0] for row in IMPLAUSIBLE_RUNS]
)
def test_an_implausible_log_has_a_note_and_no_finding(what: str, change: Break, rule: str) -> None:
    run = stranger()
    change(run)
    found = list(rule_findings(run.run()))
    assert [(each.rule, each.kind) for each in found] == [(rule, "note")] * len(found) != []
    assert all(each.text and each.fix for each in found)


def test_a_plausible_measured_step_has_no_note() -> None:
    run = stranger()
    steps(58 / 512)(run)
    assert list(rule_findings(run.run())) == []


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> list[Evidence]:
    folder = tmp_path_factory.mktemp("ten")
    return [good_run(folder, 100 + number, count) for number, count in enumerate(CONVERGED)]


def notes(runs: list[Evidence], **more: object) -> list[Finding]:
    named_runs = [run.run(f"run {number}") for number, run in enumerate(runs)]
    return list(result_findings(Result("result", named_runs, **more)))  # type: ignore[arg-type]


def almost_a_copy(runs: list[Evidence]) -> None:
    for event, other in zip(
        runs[4].all("eval_accuracy"), runs[3].all("eval_accuracy"), strict=True
    ):
        event["value"] = other["value"] + 1e-7


def fewer_caches(runs: list[Evidence]) -> None:
    first = runs[0].one("cache_clear")
    for run in runs[1:]:
        run.events.insert(0, dict(first))


def a_slow_clock(runs: list[Evidence]) -> None:
    a_clock_at_half_speed(runs[2])


def seeds(*missing: int) -> Callable[[list[Evidence]], None]:
    """Let the runs follow each other, each with the next seed; a missing one leaves its time."""

    def change(runs: list[Evidence]) -> None:
        number = seed = 0
        for run in runs:
            while seed in missing:
                seed += 1
            run.one("seed")["value"] = 500 + seed
            run.config["seed"] = 500 + seed
            shift(run, 0, 1_700_000_000_000 + seed * 25 * HOUR - run.one("run_start")["time_ms"])
            number, seed = number + 1, seed + 1

    return change


IMPLAUSIBLE_RESULTS: list[tuple[str, Callable[[list[Evidence]], None], str, str]] = [
    ("a copy that differs by 1e-7", almost_a_copy, "curves-are-of-their-own", "run 3 and run 4"),
    (
        "a cache less",
        fewer_caches,
        "caches-of-each-node",
        "1 cache_clear in 1 log, such as run 0, others have 2",
    ),
    (
        "half the clock",
        a_slow_clock,
        "runs-keep-one-pace",
        "run 2 takes 1,450.0 s, of the runs 2,900",
    ),
    (
        "two seeds left out",
        seeds(4, 5),
        "seeds-have-no-holes",
        "2 seeds left out between run 3",
    ),
]


@pytest.mark.parametrize(
    ("what", "change", "rule", "text"),
    IMPLAUSIBLE_RESULTS,
    ids=[row[0] for row in IMPLAUSIBLE_RESULTS],
)
def test_an_implausible_result_has_one_note(
    what: str,
    change: Callable[[list[Evidence]], None],
    rule: str,
    text: str,
    ten: list[Evidence],
) -> None:
    runs = [run.copy() for run in ten]
    change(runs)
    (found,) = notes(runs)
    assert (found.rule, found.kind) == (rule, "note")
    assert text in found.text


def test_seeds_that_count_up_without_a_hole_have_no_note(ten: list[Evidence]) -> None:
    runs = [run.copy() for run in ten]
    seeds()(runs)
    assert notes(runs) == []


def test_caches_are_compared_with_the_nodes_of_a_description() -> None:
    runs = [stranger().run(f"run {number}") for number in range(2)]
    for nodes, count in (("18", 0), ("20", 1)):
        result = Result("result", runs, description={"number_of_nodes": nodes})
        found = list(plausibility.caches_of_each_node.findings(result, "", closed=True))
        assert len(found) == count


def test_a_run_faster_than_all_of_the_reference_has_a_note() -> None:
    rule = plausibility.runs_need_as_many_samples
    for evaluations, count in ((27, 0), (24, 1)):
        result = Result("", [stranger(512, evaluations).run("run 0")], ruleset="6.1.0")
        found = [each.text for each in rule.findings(result, "", closed=True)]
        assert len(found) == count
    assert "run 0 after 6,291,456 samples; the reference needs" in found[0]
    assert list(rule.findings(replace(result, runs=[stranger(8192, 9).run()]), "", True)) == []


@pytest.mark.parametrize(
    ("platform", "text"),
    [
        ("18xNODE", ""),
        ("4xNVIDIA GB200", ""),
        ("72xGB200", ""),
        ("NVIDIA DGX GB200", ""),
        ("of-many-9xMI", ""),
        ("16xNVIDIA GB200", "16 of something"),
        ("18xNVIDIA GB300", "GB300"),
        (7, ""),
    ],
)
def test_a_platform_is_of_the_description(platform: object, text: str) -> None:
    run = stranger()
    run.one("submission_platform")["value"] = platform
    model = "NVIDIA Blackwell GPU (GB200)"
    told = {"number_of_nodes": "18", "accelerators_per_node": "4", "accelerator_model_name": model}
    result = Result("", [run.run()], description=told)
    found = list(plausibility.platform_is_of_the_description.findings(result, "", True))
    assert [each.kind for each in found] == ["note"] * bool(text)
    assert all(text in each.text for each in found)
    assert not list(plausibility.platform_is_of_the_description.check(Result("", [run.run()])))


def test_json_has_three_kinds_and_notes_do_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "mlperf.log"
    mlperf = {"organization": "SUBMISSION_ORG_PLACEHOLDER", "platform": "8xMI300X"}
    config = write_log(log, 7, 27, logging={"mlperf": mlperf})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["mlperf", "review", str(tmp_path), "--json"]) == EXIT_OK
    told = json.loads(capsys.readouterr().out)
    assert told["passed"]
    assert told["results"][0]["ruleset"] == "6.1.0"
    assert not any(told["results"][0]["needs"].values())
    assert told["findings"] == []
    assert [each["rule"] for each in told["notes"]] == ["names-are-filled-in"]
    assert {each["rule"] for each in told["unknowns"]} <= RULES
    assert main(["mlperf", "review", str(tmp_path)]) == EXIT_OK
    output = capsys.readouterr().out
    assert output.startswith("PASSED")
    assert "1 note, no faults, but what a reviewer asks about:" in output
    assert "unknown, as there is no validation_time: evaluations-are-as-measured" in output
    log.write_text(
        log.read_text().replace('"eval_samples", "value": 29696', '"eval_samples", "value": 64')
    )
    assert main(["mlperf", "review", str(tmp_path), "--json"]) == EXIT_ERROR
    told = json.loads(capsys.readouterr().out)
    assert not told["passed"]
    assert [each["rule"] for each in told["findings"]] == ["whole-evaluation-set"]


def test_json_of_check_is_that_of_review(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "mlperf.log"
    write_log(log, 7, 27)
    assert main(["mlperf", "check", str(log), "--json"]) == EXIT_OK
    checked = capsys.readouterr().out
    assert main(["mlperf", "review", str(log), "--json"]) == EXIT_OK
    assert json.loads(checked) == json.loads(capsys.readouterr().out)
    log.write_text(log.read_text().replace('"seed", "value": 7', '"seed", "value": "x"'))
    log.write_text(log.read_text().replace('"opt_adamw_beta_1"', '"other"'))
    assert main(["mlperf", "check", str(log), "--json"]) == EXIT_ERROR
    checked = capsys.readouterr().out
    assert main(["mlperf", "review", str(log), "--json"]) == EXIT_ERROR
    assert json.loads(checked) == json.loads(capsys.readouterr().out)
    found = {each["rule"] for each in json.loads(checked)["findings"]}
    assert found == {"compliance-checker", "one-seed"}
