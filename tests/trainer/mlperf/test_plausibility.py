"""Logs that were tampered with, and what published logs never show: the rule or note that finds each."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.mlperf.good_run import (
    EVERY,
    Break,
    Evidence,
    by_rule,
    complete,
    good_run,
    later,
    loss_after,
    meta,
    published,
    value,
    write_log,
    write_run,
)

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from fluxtrain.mlperf.compliance import check
from fluxtrain.mlperf.evidence import Result
from fluxtrain.mlperf.log_lines import TOKEN
from fluxtrain.mlperf.review import plausibility
from fluxtrain.mlperf.review.result_rules import Finding
from fluxtrain.mlperf.review.review import RULES, result_findings, rule_findings

pytestmark = pytest.mark.slow

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


IMPLAUSIBLE_RUNS: dict[str, dict[str, Break]] = {
    "blocks-take-their-time": {"a block in 0.8 s": a_block_in_no_time},
    "evaluations-are-as-measured": {
        "a clock at half speed": a_clock_at_half_speed,
        "without one measure": a_clock_without_its_measures,
    },
    "evaluations-take-their-time": {
        "evaluations in a second": evaluations_in_a_second,
        "blocks in half the time": blocks_in_half_the_time,
    },
    "clock-is-of-the-steps": {"steps twice as slow as the blocks": steps(0.23)},
    "losses-begin-untrained": {"weights that were trained before": trained_before},
    "target-is-reached-by-steps": {"a last loss that falls": a_last_loss_that_falls},
    "losses-change": {"fifteen equal losses": equal_losses},
    "names-are-filled-in": {
        "an organisation": named("submission_org", "SUBMISSION_ORG_PLACEHOLDER"),
        "a platform": named("submission_platform", "4x<platform>"),
    },
}


def stranger(size: int = 512, evaluations: int = 27) -> Evidence:
    return Evidence(list(published(size, evaluations)), {})


@pytest.mark.parametrize(("change", "rule"), by_rule(IMPLAUSIBLE_RUNS))
def test_an_implausible_log_has_a_note_and_no_finding(change: Break, rule: str) -> None:
    run = stranger()
    change(run)
    found = list(rule_findings(run.run()))
    assert [(each.rule, each.kind) for each in found] == [(rule, "note")] * len(found) != []
    assert all(each.text and each.fix for each in found)


def test_a_plausible_measured_step_has_no_note() -> None:
    run = stranger()
    steps(58 / 512)(run)
    assert list(rule_findings(run.run())) == []


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
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    names = {"organization": "SUBMISSION_ORG_PLACEHOLDER", "platform": "8xMI300X"}
    run = write_run(tmp_path / "run", 7, logging={"mlperf": names})
    log = run / "mlperf.log"
    told = json.loads(mlperf(EXIT_OK, "review", run, "--json"))
    assert told["passed"]
    assert told["results"][0]["ruleset"] == "6.1.0"
    assert not any(told["results"][0]["needs"].values())
    assert told["findings"] == []
    assert [each["rule"] for each in told["notes"]] == ["names-are-filled-in"]
    assert {each["rule"] for each in told["unknowns"]} <= RULES
    output = mlperf(EXIT_OK, "review", run)
    assert output.startswith("PASSED")
    assert "1 note, no faults, but what a reviewer asks about:" in output
    assert "unknown, as there is no validation_time: evaluations-are-as-measured" in output
    log.write_text(
        log.read_text().replace('"eval_samples", "value": 29696', '"eval_samples", "value": 64')
    )
    told = json.loads(mlperf(EXIT_ERROR, "review", run, "--json"))
    assert not told["passed"]
    assert [each["rule"] for each in told["findings"]] == ["whole-evaluation-set"]


def test_json_of_check_is_that_of_review(tmp_path: Path, mlperf: Callable[..., str]) -> None:
    log = tmp_path / "mlperf.log"
    write_log(log, 7, 27)
    checked = mlperf(EXIT_OK, "check", log, "--json")
    assert json.loads(checked) == json.loads(mlperf(EXIT_OK, "review", log, "--json"))
    log.write_text(log.read_text().replace('"seed", "value": 7', '"seed", "value": "x"'))
    log.write_text(log.read_text().replace('"opt_adamw_beta_1"', '"other"'))
    checked = mlperf(EXIT_ERROR, "check", log, "--json")
    assert json.loads(checked) == json.loads(mlperf(EXIT_ERROR, "review", log, "--json"))
    found = {each["rule"] for each in json.loads(checked)["findings"]}
    assert found == {"compliance-checker", "one-seed"}


NOTHING, CHECKER = "", "compliance-checker"
"""Instead of a rule: nothing can see it; no rule of ours needs to, as MLCommons' checker fails."""
STEPS = 512
MINUTE = 60_000


def part(key: str, name: str, given: Any, number: int = 0) -> Break:
    """Change another part of an event than its value."""
    return lambda run: run.one(key, number).update({name: given})


def again(key: str, given: Any) -> Break:
    """State a setting a second time."""
    return lambda run: run.events.insert(run.at(key) + 1, run.one(key) | {"value": given})


def without(*keys: str) -> Break:
    def change(run: Evidence) -> None:
        run.events = [event for event in run.events if event["key"] not in keys]

    return change


def of_each(key: str, change: Callable[[dict[str, Any], int], object]) -> Break:
    return lambda run: [change(event, number) for number, event in enumerate(run.all(key))]


def faster(run: Evidence, of: str = "run_start", factor: float = 0.5) -> None:
    start = run.one(of)["time_ms"]
    for event in run.events[run.at(of) :]:
        event["time_ms"] = start + int((event["time_ms"] - start) * factor)


def faster_with_its_measures(run: Evidence) -> None:
    faster(run)
    for event in run.all("tracked_stats"):
        if "validation_time" in event["value"]:
            event["value"]["validation_time"] /= 2


def fast_blocks(run: Evidence) -> None:
    for number in range(len(run.all("block_stop"))):
        later("tracked_stats", -29_000, 1 + 2 * number)(run)


def swapped(one: int, other: int) -> Break:
    """Exchange the losses of two evaluations."""

    def change(run: Evidence) -> None:
        first, second = run.one("eval_accuracy", one), run.one("eval_accuracy", other)
        first["value"], second["value"] = second["value"], first["value"]

    return change


def reordered(run: Evidence) -> None:
    """Exchange the lines of two evaluations, with their samples."""
    first, second = run.at("eval_accuracy", 4), run.at("eval_accuracy", 5)
    time = run.events[first]["time_ms"], run.events[second]["time_ms"]
    run.events[first], run.events[second] = run.events[second], run.events[first]
    run.events[first]["time_ms"], run.events[second]["time_ms"] = time


def without_its_head(blocks: int) -> Break:
    """Remove the first blocks, and count the rest as if they were the first."""

    def change(run: Evidence) -> None:
        start, end = run.at("block_start"), run.at("block_start", blocks)
        gone = run.events[end]["time_ms"] - run.events[start]["time_ms"]
        del run.events[start:end]
        for event in run.events[start:]:
            event["time_ms"] -= gone
            metadata = event["metadata"]
            if not event["key"].startswith("block") and "samples_count" in metadata:
                metadata["samples_count"] -= blocks * EVERY
            if metadata.get("step"):
                metadata["step"] -= blocks * STEPS

    return change


def moved(key: str, milliseconds: int) -> Break:
    return lambda run: run.one(key).update(time_ms=run.one(key)["time_ms"] + milliseconds)


def a_late_start(run: Evidence) -> None:
    for event in run.events[run.at("init_start") : run.at("init_stop")]:
        event["time_ms"] = run.one("init_stop")["time_ms"] - 1


def a_second_run(run: Evidence) -> None:
    run.events += [event | {"time_ms": event["time_ms"] + 10**8} for event in run.events]


TAMPERED: dict[str, dict[str, Break]] = {
    "evaluations-take-their-time": {"all blocks in half the time": fast_blocks},
    "evaluations-are-as-measured": {"the clock of all halved": faster},
    NOTHING: {
        "the clock and its measures halved": faster_with_its_measures,
        "one block shorter by a twentieth": later("tracked_stats", -2_900, 7),
        "all a year later": later("cache_clear", 365 * 24 * 60 * MINUTE),
        "an initialisation that starts later": a_late_start,
        "two late losses exchanged": swapped(15, 16),
        "losses lower by a thousandth": of_each(
            "eval_accuracy", lambda event, _: event.update(value=event["value"] - 0.001)
        ),
        "the batch size twice": again("global_batch_size", 512),
        "a rate of 10": value("opt_base_learning_rate", 10.0),
    },
    "blocks-take-their-time": {"one block shorter by a fifth": later("tracked_stats", -12_000, 7)},
    "clock-goes-forward": {
        "the end two seconds earlier": moved("run_stop", -2_000),
        "the start a minute later": moved("run_start", MINUTE),
        "a negative time": part("block_stop", "time_ms", -5, 2),
        "times in seconds": lambda run: [
            event.update(time_ms=event["time_ms"] // 1000) for event in run.events
        ],
    },
    "readable-lines": {
        "a time in words": part("block_stop", "time_ms", "1700000000000", 2),
        "a time that is true": part("block_stop", "time_ms", True, 2),
        "a time that is NaN": part("block_stop", "time_ms", math.nan, 2),
    },
    "evaluation-cadence": {
        "only the last evaluation": lambda run: [
            run.events.remove(event) for event in run.all("eval_accuracy")[:-1]
        ],
        "two evaluations reordered": reordered,
        "an evaluation again, lower": lambda run: run.events.insert(
            run.at("eval_accuracy", 3), run.one("eval_accuracy", 3) | {"value": 0.59}
        ),
        "another key for a bad loss": part("eval_accuracy", "key", "eval_accuracy ", 7),
        "samples in words": meta("eval_accuracy", "samples_count", str(EVERY)),
        "samples with a point": meta("eval_accuracy", "samples_count", float(EVERY)),
    },
    "losses-begin-untrained": {
        "an early and a late loss exchanged": swapped(2, 20),
        "the first four blocks cut off": without_its_head(4),
    },
    "target-is-reached-by-steps": {
        "a last loss that falls": of_each(
            "eval_accuracy",
            lambda event, number: number < 27 and event.update(value=event["value"] + 0.003),
        ),
    },
    "losses-change": {
        "losses of two digits": of_each(
            "eval_accuracy",
            lambda event, number: (
                number < 27 and event.update(value=math.ceil(event["value"] * 100) / 100)
            ),
        ),
    },
    "whole-evaluation-set": {
        "a validation sample more than the set": value("eval_samples", 29_697)
    },
    "steps-are-samples": {"another batch size": value("global_batch_size", 1024)},
    "batch-is-a-count": {
        "a batch of 0": value("global_batch_size", 0),
        "a batch with a point": value("global_batch_size", 512.0),
    },
    "settings-are-stated-once": {"a second batch size": again("global_batch_size", 4096)},
    "training-losses-are-numbers": {
        "a training loss of NaN": value("tracked_stats", {"train_loss": math.nan}, 1)
    },
}
"""Changes of the honest log that MLCommons' checker passes, by the rule that finds them."""
REFUSED: dict[str, dict[str, Break]] = {
    CHECKER: {
        "an initialisation of 31 minutes": later("init_stop", 31 * MINUTE),
        "a negative warm-up": value("opt_learning_rate_warmup_steps", -1),
        "another beta": value("opt_adamw_beta_1", 0.8),
        "a decay in words": value("opt_adamw_weight_decay", "0.1"),
        "another optimizer": value("opt_name", "adam"),
        "no norm": without("opt_gradient_clip_norm"),
        "an accumulation of 0": value("gradient_accumulation_steps", 0),
        "evaluations twice as often": value("evaluation_frequency", EVERY // 2),
        "no cache_clear": without("cache_clear"),
    },
    "evaluation-is-a-number": {"the last loss is NaN": value("eval_accuracy", math.nan, -1)},
    "batch-is-a-count": {"a batch in words": value("global_batch_size", "512")},
    "settings-are-stated-once": {
        "a second rate": again("opt_base_learning_rate", 1e-4),
        "a second organisation": again("submission_org", "other"),
        "the second division": again("submission_division", "open"),
    },
    "readable-lines": {"metadata that are null": part("eval_accuracy", "metadata", None, 3)},
    "one-run-per-log": {
        "a second run below": a_second_run,
        "no end": without("run_stop"),
    },
}


@pytest.fixture(scope="module")
def honest() -> Evidence:
    return Evidence(complete(512, 28), {})


def written(run: Evidence, folder: Path) -> Path:
    path = folder / "result_0.txt"
    path.write_text("".join(f"{TOKEN}{json.dumps(event)}\n" for event in run.events))
    return path


def test_the_honest_log_has_no_finding_of_ours_or_the_checker(
    honest: Evidence, tmp_path: Path
) -> None:
    assert list(rule_findings(honest.run())) == []
    assert check(written(honest, tmp_path), "6.0.0").success


@pytest.mark.parametrize(
    ("change", "rule", "passes"), by_rule(TAMPERED, True) + by_rule(REFUSED, False)
)
def test_a_tampered_log_is_found_as_the_table_says(
    change: Break, rule: str, passes: bool, honest: Evidence, tmp_path: Path
) -> None:
    """Where the checker fails and no rule of ours finds anything, its words are the finding."""
    run = honest.copy()
    change(run)
    found = {each.rule for each in rule_findings(run.run())}
    assert rule in found if rule not in (NOTHING, CHECKER) else not found
    checked = check(written(run, tmp_path), "6.0.0")
    assert checked.success == passes
    assert rule != CHECKER or checked.explanations


def test_a_batch_that_is_no_count_is_found_in_logs_of_ours(tmp_path: Path) -> None:
    for given in (0, 512.0, "512", None, True, -512):
        run = good_run(tmp_path)
        run.one("global_batch_size")["value"] = given
        assert "batch-is-a-count" in {each.rule for each in rule_findings(run.run())}


Bytes = Callable[[bytes], bytes]
FILES: dict[str, dict[str, Bytes]] = {
    NOTHING: {
        "CRLF": lambda log: log.replace(b"\n", b"\r\n"),
        "a mark of UTF-8": lambda log: b"\xef\xbb\xbf" + log,
        "bytes that are no UTF-8": lambda log: b"\xff\xfe\x80\n" + log,
        "a prefix on each line": lambda log: log.replace(b":::MLLOG", b"[rank0] :::MLLOG"),
    },
    "readable-lines": {
        "two events on one line": lambda log: log.replace(b"\n:::MLLOG", b" :::MLLOG", 1),
        "a value twice in one event": lambda log: log.replace(
            b'"value": 0.5859', b'"value": 0.6, "value": 0.5859'
        ),
    },
}
"""Changes of the bytes, with which MLCommons' checker passes the log."""
REFUSED_FILES: dict[str, dict[str, Bytes]] = {
    "readable-lines": {
        "cut in a line": lambda log: log[:-40],
        "text behind an event": lambda log: log.replace(b"}\n", b"} end\n", 1),
    },
    "one-run-per-log": {
        "cut after a line": lambda log: log[: log.index(b"\n", -1500) + 1],
        "without its head": lambda log: log[len(log) // 2 :],
    },
}
"""Changes of the bytes, with which MLCommons' checker refuses the log."""


@pytest.mark.parametrize(
    ("change", "rule", "passes"), by_rule(FILES, True) + by_rule(REFUSED_FILES, False)
)
def test_a_tampered_file_is_found_as_the_table_says(
    change: Bytes,
    rule: str,
    passes: bool,
    honest: Evidence,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = written(honest, tmp_path)
    log.write_bytes(change(log.read_bytes()))
    assert check(log, "6.0.0").success == passes
    code = main(["mlperf", "review", str(log), "--json"])
    found = {each["rule"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert (code, rule in found) == ((EXIT_ERROR, True) if rule else (EXIT_OK, False))


@pytest.mark.parametrize("command", ["review", "check", "campaign status"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (gzip.compress(b":::MLLOG"), "gzip"),
        (b"no log\n", "not an MLPerf log"),
        (":::MLLOG {}\n".encode("utf-16"), "not a text file"),
    ],
    ids=["empty", "gzip", "text", "UTF-16"],
)
def test_what_is_no_log_is_one_line(
    content: bytes,
    text: str,
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mlperf: Callable[..., str],
) -> None:
    log = tmp_path / "result_0.txt"
    log.write_bytes(content)
    if not content and command == "campaign status":  # of a run that has just begun
        assert main(["mlperf", *command.split(), str(log)]) == EXIT_OK
        assert "waiting" in capsys.readouterr().out
        return
    code = main(["mlperf", *command.split(), str(log)])
    said = capsys.readouterr()
    assert code == EXIT_USAGE, said.out
    (line,) = (said.out + said.err).splitlines()
    assert text in line


def each_run(change: Break) -> Callable[[list[Evidence]], object]:
    return lambda runs: [change(run) for run in runs]


def a_copy_with_another_seed(runs: list[Evidence]) -> None:
    seed = runs[3].one("seed")["value"]
    runs[3].events = runs[4].copy().events
    runs[3].one("seed")["value"] = seed


def later_copy(runs: list[Evidence]) -> None:
    a_copy_with_another_seed(runs)
    later("cache_clear", 10**9)(runs[3])


def small_seeds(runs: list[Evidence]) -> None:
    for number, run in enumerate(runs):
        run.one("seed")["value"] = run.config["seed"] = number


def early(run: Evidence) -> None:
    """Reach the target after 24 evaluations; the reference's mean is 27.6."""
    at = run.at("block_start", 24)
    stop = run.one("run_stop")
    run.events = [*run.events[:at], stop]
    run.one("eval_accuracy", -1)["value"] = 0.5859
    stop["metadata"]["samples_count"] = 24 * EVERY


RESULTS: dict[str, dict[str, Callable[[list[Evidence]], object]]] = {
    "same-submission": {
        "two submitters": lambda runs: value("submission_org", "other")(runs[3]),
        "another batch in one": lambda runs: value("global_batch_size", 256)(runs[3]),
    },
    "runs-are-different-runs": {
        "a copy with another seed": a_copy_with_another_seed,
        "a later copy with another seed": later_copy,
    },
    "seeds-are-drawn": {"seeds from 0 on": small_seeds},
    "runs-keep-one-pace": {"one run's clock halved": lambda runs: faster(runs[3])},
    NOTHING: {
        "all runs' clocks halved": each_run(faster),
        "runs at the same time": each_run(lambda run: later("cache_clear", -(10**9))(run)),
    },
    "runs-need-as-many-samples": {"one early run": lambda runs: early(runs[3])},
    "converges-as-the-reference": {"all runs early": each_run(early)},
    "same-settings": {
        "no warm-up in one": lambda runs: without("opt_learning_rate_warmup_steps")(runs[3])
    },
    "ten-runs": {"a run left out": lambda runs: runs.pop(3)},
}


@pytest.mark.parametrize(("change", "rule"), by_rule(RESULTS))
def test_a_tampered_result_is_found_as_the_table_says(
    change: Callable[[list[Evidence]], object], rule: str, ten: list[Evidence]
) -> None:
    runs = [run.copy() for run in ten]
    change(runs)
    named = [run.run(f"run {number}") for number, run in enumerate(runs)]
    found = {each.rule for each in result_findings(Result("", named))}
    assert rule in found if rule else not found
