"""Tampered logs: the rule that finds each, or that none can, and what MLCommons' checker says of it."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.mlperf.good_run import (
    CONVERGED,
    EVERY,
    Evidence,
    complete,
    good_run,
    later,
    meta,
    value,
)

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from fluxtrain.mlperf.compliance import check
from fluxtrain.mlperf.evidence import Result
from fluxtrain.mlperf.log_lines import TOKEN
from fluxtrain.mlperf.review.review import result_findings, rule_findings

Break = Callable[[Evidence], object]
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


TAMPERED: list[tuple[str, Break, str, bool]] = [
    # times
    ("all blocks in half the time", fast_blocks, "evaluations-take-their-time", True),
    ("the clock of all halved", faster, "evaluations-are-as-measured", True),
    ("the clock and its measures halved", faster_with_its_measures, NOTHING, True),
    (
        "one block shorter by a fifth",
        later("tracked_stats", -12_000, 7),
        "blocks-take-their-time",
        True,
    ),
    ("one block shorter by a twentieth", later("tracked_stats", -2_900, 7), NOTHING, True),
    ("the end two seconds earlier", moved("run_stop", -2_000), "clock-goes-forward", True),
    ("the start a minute later", moved("run_start", MINUTE), "clock-goes-forward", True),
    ("all a year later", later("cache_clear", 365 * 24 * 60 * MINUTE), NOTHING, True),
    ("an initialisation of 31 minutes", later("init_stop", 31 * MINUTE), CHECKER, False),
    ("an initialisation that starts later", a_late_start, NOTHING, True),
    ("a negative time", part("block_stop", "time_ms", -5, 2), "clock-goes-forward", True),
    (
        "times in seconds",
        lambda run: [event.update(time_ms=event["time_ms"] // 1000) for event in run.events],
        "clock-goes-forward",
        True,
    ),
    ("a time in words", part("block_stop", "time_ms", "1700000000000", 2), "readable-lines", True),
    ("a time that is true", part("block_stop", "time_ms", True, 2), "readable-lines", True),
    ("a time that is NaN", part("block_stop", "time_ms", math.nan, 2), "readable-lines", True),
    # evaluations
    (
        "only the last evaluation",
        lambda run: [run.events.remove(event) for event in run.all("eval_accuracy")[:-1]],
        "evaluation-cadence",
        True,
    ),
    ("two evaluations reordered", reordered, "evaluation-cadence", True),
    (
        "an evaluation again, lower",
        lambda run: run.events.insert(
            run.at("eval_accuracy", 3), run.one("eval_accuracy", 3) | {"value": 0.59}
        ),
        "evaluation-cadence",
        True,
    ),
    ("an early and a late loss exchanged", swapped(2, 20), "losses-begin-untrained", True),
    ("two late losses exchanged", swapped(15, 16), NOTHING, True),
    ("the first four blocks cut off", without_its_head(4), "losses-begin-untrained", True),
    (
        "a last loss that falls",
        of_each(
            "eval_accuracy",
            lambda event, number: number < 27 and event.update(value=event["value"] + 0.003),
        ),
        "target-is-reached-by-steps",
        True,
    ),
    (
        "losses of two digits",
        of_each(
            "eval_accuracy",
            lambda event, number: (
                number < 27 and event.update(value=math.ceil(event["value"] * 100) / 100)
            ),
        ),
        "losses-change",
        True,
    ),
    (
        "losses lower by a thousandth",
        of_each("eval_accuracy", lambda event, _: event.update(value=event["value"] - 0.001)),
        NOTHING,
        True,
    ),
    (
        "another key for a bad loss",
        part("eval_accuracy", "key", "eval_accuracy ", 7),
        "evaluation-cadence",
        True,
    ),
    (
        "samples in words",
        meta("eval_accuracy", "samples_count", str(EVERY)),
        "evaluation-cadence",
        True,
    ),
    (
        "samples with a point",
        meta("eval_accuracy", "samples_count", float(EVERY)),
        "evaluation-cadence",
        True,
    ),
    (
        "a validation sample more than the set",
        value("eval_samples", 29_697),
        "whole-evaluation-set",
        True,
    ),
    ("the last loss is NaN", value("eval_accuracy", math.nan, -1), "evaluation-is-a-number", False),
    # settings
    ("another batch size", value("global_batch_size", 1024), "steps-are-samples", True),
    ("a batch of 0", value("global_batch_size", 0), "batch-is-a-count", True),
    ("a batch with a point", value("global_batch_size", 512.0), "batch-is-a-count", True),
    ("a batch in words", value("global_batch_size", "512"), "batch-is-a-count", False),
    ("a second batch size", again("global_batch_size", 4096), "settings-are-stated-once", True),
    ("the batch size twice", again("global_batch_size", 512), NOTHING, True),
    ("a second rate", again("opt_base_learning_rate", 1e-4), "settings-are-stated-once", False),
    ("a second organisation", again("submission_org", "other"), "settings-are-stated-once", False),
    ("a negative warm-up", value("opt_learning_rate_warmup_steps", -1), CHECKER, False),
    ("another beta", value("opt_adamw_beta_1", 0.8), CHECKER, False),
    ("a decay in words", value("opt_adamw_weight_decay", "0.1"), CHECKER, False),
    ("another optimizer", value("opt_name", "adam"), CHECKER, False),
    ("no norm", without("opt_gradient_clip_norm"), CHECKER, False),
    ("an accumulation of 0", value("gradient_accumulation_steps", 0), CHECKER, False),
    ("evaluations twice as often", value("evaluation_frequency", EVERY // 2), CHECKER, False),
    ("a rate of 10", value("opt_base_learning_rate", 10.0), NOTHING, True),
    ("no cache_clear", without("cache_clear"), CHECKER, False),
    (
        "the second division",
        again("submission_division", "open"),
        "settings-are-stated-once",
        False,
    ),
    (
        "a training loss of NaN",
        value("tracked_stats", {"train_loss": math.nan}, 1),
        "training-losses-are-numbers",
        True,
    ),
    # lines
    ("metadata that are null", part("eval_accuracy", "metadata", None, 3), "readable-lines", False),
    ("a second run below", a_second_run, "one-run-per-log", False),
    ("no end", without("run_stop"), "one-run-per-log", False),
]


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
    ("what", "change", "rule", "passes"), TAMPERED, ids=[row[0] for row in TAMPERED]
)
def test_a_tampered_log_is_found_as_the_table_says(
    what: str, change: Break, rule: str, passes: bool, honest: Evidence, tmp_path: Path
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
FILES: list[tuple[str, Bytes, str, bool]] = [
    ("CRLF", lambda log: log.replace(b"\n", b"\r\n"), NOTHING, True),
    ("a mark of UTF-8", lambda log: b"\xef\xbb\xbf" + log, NOTHING, True),
    ("bytes that are no UTF-8", lambda log: b"\xff\xfe\x80\n" + log, NOTHING, True),
    (
        "a prefix on each line",
        lambda log: log.replace(b":::MLLOG", b"[rank0] :::MLLOG"),
        NOTHING,
        True,
    ),
    ("cut in a line", lambda log: log[:-40], "readable-lines", False),
    ("cut after a line", lambda log: log[: log.index(b"\n", -1500) + 1], "one-run-per-log", False),
    ("without its head", lambda log: log[len(log) // 2 :], "one-run-per-log", False),
    (
        "text behind an event",
        lambda log: log.replace(b"}\n", b"} end\n", 1),
        "readable-lines",
        False,
    ),
    ("UTF-16", lambda log: log.decode().encode("utf-16"), "", False),
    (
        "two events on one line",
        lambda log: log.replace(b"\n:::MLLOG", b" :::MLLOG", 1),
        "readable-lines",
        True,
    ),
    (
        "a value twice in one event",
        lambda log: log.replace(b'"value": 0.5859', b'"value": 0.6, "value": 0.5859'),
        "readable-lines",
        True,
    ),
]
"""Changes of the bytes; of what is no log the commands say so."""


@pytest.mark.parametrize(("what", "change", "rule", "passes"), FILES, ids=[row[0] for row in FILES])
def test_a_tampered_file_is_found_as_the_table_says(
    what: str,
    change: Bytes,
    rule: str,
    passes: bool,
    honest: Evidence,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = written(honest, tmp_path)
    log.write_bytes(change(log.read_bytes()))
    if what == "UTF-16":
        for command in ("review", "check"):
            assert main(["mlperf", command, str(log)]) == EXIT_USAGE
        return
    assert check(log, "6.0.0").success == passes
    code = main(["mlperf", "review", str(log), "--json"])
    found = {each["rule"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert (code, rule in found) == ((EXIT_ERROR, True) if rule else (EXIT_OK, False))


@pytest.mark.parametrize("command", ["review", "check", "campaign status"])
@pytest.mark.parametrize(
    ("content", "text"),
    [(b"", "is empty"), (gzip.compress(b":::MLLOG"), "gzip"), (b"no log\n", "not an MLPerf log")],
    ids=["empty", "gzip", "text"],
)
def test_what_is_no_log_is_one_line(
    content: bytes, text: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


RESULTS: list[tuple[str, Callable[[list[Evidence]], object], str]] = [
    ("two submitters", lambda runs: value("submission_org", "other")(runs[3]), "same-submission"),
    ("a copy with another seed", a_copy_with_another_seed, "runs-are-different-runs"),
    ("a later copy with another seed", later_copy, "runs-are-different-runs"),
    ("seeds from 0 on", small_seeds, "seeds-are-drawn"),
    ("one run's clock halved", lambda runs: faster(runs[3]), "runs-keep-one-pace"),
    ("all runs' clocks halved", each_run(faster), NOTHING),
    ("one early run", lambda runs: early(runs[3]), "runs-need-as-many-samples"),
    ("all runs early", each_run(early), "converges-as-the-reference"),
    (
        "another batch in one",
        lambda runs: value("global_batch_size", 256)(runs[3]),
        "same-submission",
    ),
    (
        "no warm-up in one",
        lambda runs: without("opt_learning_rate_warmup_steps")(runs[3]),
        "same-settings",
    ),
    ("a run left out", lambda runs: runs.pop(3), "ten-runs"),
    ("runs at the same time", each_run(lambda run: later("cache_clear", -(10**9))(run)), NOTHING),
]


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> list[Evidence]:
    folder = tmp_path_factory.mktemp("ten")
    return [good_run(folder, 100 + number, count) for number, count in enumerate(CONVERGED)]


@pytest.mark.parametrize(("what", "change", "rule"), RESULTS, ids=[row[0] for row in RESULTS])
def test_a_tampered_result_is_found_as_the_table_says(
    what: str, change: Callable[[list[Evidence]], object], rule: str, ten: list[Evidence]
) -> None:
    runs = [run.copy() for run in ten]
    change(runs)
    named = [run.run(f"run {number}") for number, run in enumerate(runs)]
    found = {each.rule for each in result_findings(Result("", named))}
    assert rule in found if rule else not found
