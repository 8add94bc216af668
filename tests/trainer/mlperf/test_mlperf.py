"""The MLPerf log against MLCommons' checker: complete and killed runs, and explanations of bad logs."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import delitem
from pathlib import Path
from typing import Any

import pytest
from mlperf_logging.compliance_checker import mlp_compliance

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.order import BatchShares
from fluxtrain.errors import ConfigError, StorageError
from fluxtrain.mlperf import RULESETS, MLPerfLog, RunFacts, check, compliance, render
from fluxtrain.mlperf.compliance import run_tool
from fluxtrain.mlperf.review.review import rule_findings
from fluxtrain.mlperf.review.tree import read_results

GBS = 1024
STEPS, EVERY, LOGGED, SAVED = 1024, 256, 96, 128  # evaluated, logged and saved every so many steps
START, RESUMED = 1_700_000_000.0, 1_700_050_000.0  # Unix times
Event = dict[str, Any]
Change = Callable[[list[Event]], object]

# Keys that are mandatory in all rulesets, since 6.1.0, and optional ones.
MANDATORY = [
    *("cache_clear", "init_start", "init_stop", "run_start", "run_stop"),
    *("submission_benchmark", "submission_org", "submission_division", "submission_platform"),
    *("block_start", "block_stop", "eval_accuracy", "evaluation_frequency"),
    *("global_batch_size", "gradient_accumulation_steps", "train_samples", "eval_samples"),
    *("opt_name", "opt_adamw_beta_1", "opt_adamw_beta_2", "opt_adamw_epsilon"),
    *("opt_adamw_weight_decay", "opt_gradient_clip_norm"),
    *("opt_base_learning_rate", "opt_learning_rate_warmup_steps"),
]
MANDATORY_SINCE_6_1 = [
    *(f"lowest_numerical_precision_in_{where}" for where in ("linear", "attn", "comm")),
    *(f"{axis}_parallelism" for axis in ("tensor", "pipeline", "context", "expert")),
    *("micro_batch_size", "config_filename"),
]
OPTIONAL = [
    *("submission_status", "target_accuracy", "seed", "tracked_stats", "eval_start", "eval_stop"),
]


class Clock:
    """Unix time that advances by a second with each call."""

    def __init__(self, start: float = START) -> None:
        self.time = start

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "mlperf.log"


def make_config(**changes: Any) -> RunConfig:
    base = {
        "preset": "mlperf-schnell",
        "seed": 7,
        "schedule": {"steps": STEPS, "global_batch_size": GBS},
    }
    return resolve(merge(base, changes))


def make_facts(config: RunConfig | None = None, started: float = START) -> RunFacts:
    return RunFacts(config or make_config(), BatchShares(GBS, 32, 8), 1_099_776, 29_696, started)


def open_log(path: Path | None, samples: int, clock: Clock, **changes: Any) -> MLPerfLog:
    facts = make_facts(make_config(**changes), clock.time)
    return MLPerfLog.open(path, samples, changes.pop("stdout", False), facts, clock)


def steps(log: MLPerfLog, first: int, loss: float = 0.55) -> Iterator[int]:
    """Log like the trainer from step ``first`` on; yield the samples at each saved checkpoint."""
    log.ready()
    for step in range(first + 1, STEPS + 1):
        samples = step * GBS
        log.block_start(samples - GBS)
        if step % LOGGED == 0:
            log.tracked_stats(samples, {"throughput": 100.0, "loss": 0.6, "lr": 1e-4})
        if step % EVERY == 0:
            log.block_stop(samples)
            log.eval_start(samples)
            log.eval_accuracy(samples, loss if step == STEPS else 0.7)
            log.eval_stop(samples)
        if step % SAVED == 0:
            yield samples
    log.block_stop(STEPS * GBS)
    log.run_stop("success", STEPS * GBS)
    log.close()


def finish(path: Path, first: int, start: float = RESUMED, **changes: Any) -> None:
    """Resume the log of a run at step ``first`` and complete it."""
    for _ in steps(open_log(path, first * GBS, Clock(start), **changes), first):
        pass


@pytest.fixture(scope="module")
def complete_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("complete") / "mlperf.log"
    finish(path, 0, START)
    return path.read_text()


@pytest.fixture
def complete(log: Path, complete_text: str) -> Path:
    log.write_text(complete_text)
    return log


def accepted(log: Path, ruleset: str = RULESETS[-1]) -> bool:
    """Run the checker in this process, which is even faster than a fork."""
    logging.disable(logging.CRITICAL)
    try:
        checker = mlp_compliance.make_checker("training", ruleset, quiet=True, werror=False)
        return bool(checker.check_file(str(log), f"training_{ruleset}/common.yaml"))
    finally:
        logging.disable(logging.NOTSET)


def events(log: Path) -> list[Event]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]


def edited(path: Path, change: Change) -> Path:
    """Apply ``change`` to the events of a log and write them back."""
    changed = events(path)
    change(changed)
    path.write_text("".join(f":::MLLOG {json.dumps(event)}\n" for event in changed))
    return path


def require_order(log: Path) -> None:
    """Check what the checker does not: one start, matching pairs, ascending times and samples."""
    logged = events(log)
    names = [event["key"] for event in logged]
    for once in ("init_start", "init_stop", "run_start", "run_stop"):
        assert names.count(once) == 1
    pairs = [n for n in names if n in ("block_start", "block_stop", "eval_start", "eval_stop")]
    assert pairs == ["block_start", "block_stop", "eval_start", "eval_stop"] * (len(pairs) // 4)
    samples = [event["metadata"].get("samples_count", 0) for event in logged]
    assert all(a <= b for a, b in pairwise(samples) if b)
    times = [event["time_ms"] for event in logged]
    assert times == sorted(times)
    (result,) = read_results([log])
    told = rule_findings(result.runs[0])  # notes are on the clock, which is a stand-in here
    found = {each.rule for each in told if each.kind == "finding"}
    resumed = {"not-resumed"} if "run_resumed" in names else set()
    assert found == {"caches-are-flushed", *resumed}


@pytest.mark.parametrize("ruleset", RULESETS)
def test_a_complete_run_passes_the_checker(
    complete: Path, ruleset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compliance, "run_tool", run_tool)
    result = check(complete, ruleset)
    assert result.success
    assert result.explanations == []
    assert "SUCCESS" in render(result)
    assert list(tmp_path.iterdir()) == [complete]  # the checker writes no file
    require_order(complete)


def test_a_run_of_the_open_division_passes(log: Path) -> None:
    finish(log, 0, logging={"mlperf": {"division": "open", "status": "research"}})
    assert all(accepted(log, ruleset) for ruleset in RULESETS)


@pytest.mark.slow
@pytest.mark.parametrize("key", MANDATORY + MANDATORY_SINCE_6_1 + OPTIONAL)
def test_a_missing_key_fails_as_the_rules_require(complete: Path, key: str) -> None:
    lines = complete.read_text().splitlines(keepends=True)
    kept = [line for line in lines if f'"key": "{key}"' not in line]
    assert len(kept) < len(lines)
    complete.write_text("".join(kept))
    passes = [ruleset for ruleset in RULESETS if accepted(complete, ruleset)]
    if key in MANDATORY:
        assert passes == []
    else:
        assert passes == list(RULESETS[:2] if key in MANDATORY_SINCE_6_1 else RULESETS)


def test_the_log_has_the_actual_values(log: Path, tmp_path: Path) -> None:
    config = make_config(
        seed=7, optim={"learning_rate": 2.5e-4}, precision={"compute": "float32"}, evaluation={}
    )
    facts = RunFacts(config, BatchShares(GBS, 64, 4), 5000, 320, started=100.0)
    MLPerfLog.open(tmp_path / "mlperf.log", 0, False, facts).close()
    logged = {event["key"]: event for event in events(tmp_path / "mlperf.log")}
    expected = {
        "seed": 7,
        "train_samples": 5000,
        "eval_samples": 320,
        "global_batch_size": GBS,
        "micro_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "opt_base_learning_rate": 2.5e-4,
        "target_accuracy": 0.586,
        "cache_clear": False,
        "lowest_numerical_precision_in_linear": "fp32",
        "lowest_numerical_precision_in_comm": "fp32",
        "config_filename": "config.json",
    }
    assert {key: logged[key]["value"] for key in expected} == expected
    assert logged["init_start"]["time_ms"] == 100_000  # the launcher's start, not the trainer's
    assert logged["seed"]["metadata"]["file"] == "fluxtrain/mlperf/log.py"


def test_a_batch_that_does_not_divide_the_interval_satisfies_only_the_newest_ruleset(
    log: Path,
) -> None:
    schedule = {"global_batch_size": 2304, "warmup_steps": 0}
    finish(log, 0, schedule=schedule, optim={"learning_rate": 1.85e-4})
    frequency = [e["value"] for e in events(log) if e["key"] == "evaluation_frequency"]
    assert frequency == [262_656]
    assert [ruleset for ruleset in RULESETS if accepted(log, ruleset)] == ["6.1.0"]
    (text,) = check(log, "5.1.0").explanations
    assert "262656; ruleset 5.1.0 allows 262144 only" in text


@pytest.mark.slow
def test_a_run_killed_at_any_line_resumes_its_log(log: Path, tmp_path: Path) -> None:
    whole, saves = tmp_path / "whole.log", [(0, 0)]
    for samples in steps(open_log(whole, 0, Clock()), 0):
        saves.append((len(whole.read_text().splitlines()), samples))
    lines = whole.read_text().splitlines()
    for cut in range(len(lines)):
        saved = max(samples for written, samples in saves if written <= cut)
        torn = lines[cut][: len(lines[cut]) * 2 // 3]
        log.write_text("".join(f"{line}\n" for line in lines[:cut]) + torn)
        finish(log, saved // GBS)
        require_order(log)
        assert accepted(log), cut


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_lost_lines_leave_no_incomplete_evaluation(log: Path, lost: int) -> None:
    run = steps(open_log(log, 0, Clock()), 0)
    assert [next(run), next(run)] == [SAVED * GBS, EVERY * GBS]  # saved right after the evaluation
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-lost]))
    finish(log, EVERY)
    names = [event["key"] for event in events(log)]
    assert names.count("eval_start") == names.count("eval_stop") == names.count("eval_accuracy")
    assert names.count("block_start") == names.count("block_stop")
    assert accepted(log)


def test_two_resumes_are_logged(log: Path) -> None:
    for attempt, first in enumerate((0, 2 * SAVED, 4 * SAVED)):
        run = steps(open_log(log, first * GBS, Clock(START + 1e5 * attempt)), first)
        for _ in zip(range(3), run, strict=False):  # the third checkpoint is lost with the process
            pass
    for _ in run:
        pass
    resumed = [e["metadata"]["samples_count"] for e in events(log) if e["key"] == "run_resumed"]
    assert resumed == [2 * SAVED * GBS, 4 * SAVED * GBS]
    require_order(log)
    assert check(log).success


def test_stdout_of_the_last_process_is_the_complete_log(
    log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    facts = make_facts()
    first = steps(MLPerfLog.open(log, 0, True, facts, Clock()), 0)
    saved = next(first)
    assert capfd.readouterr().out == log.read_text()
    for _ in steps(MLPerfLog.open(log, saved, True, facts, Clock(RESUMED)), saved // GBS):
        pass
    assert capfd.readouterr().out == log.read_text()
    assert accepted(log)


def test_a_finished_log_is_not_changed(complete: Path) -> None:
    before = complete.read_bytes()
    again = open_log(complete, STEPS * GBS, Clock())
    again.ready()
    again.block_start(STEPS * GBS)
    again.run_stop("aborted", STEPS * GBS)
    again.close()
    assert complete.read_bytes() == before


def test_more_steps_remove_the_run_stop(log: Path) -> None:
    for _ in steps(open_log(log, 0, Clock()), 0, loss=0.7):
        pass
    more = open_log(log, STEPS * GBS, Clock(RESUMED), schedule={"steps": STEPS + EVERY})
    end = (STEPS + EVERY) * GBS
    more.block_start(STEPS * GBS)
    more.block_stop(end)
    more.eval_start(end)
    more.eval_accuracy(end, 0.5)
    more.eval_stop(end)
    more.run_stop("success", end)
    more.close()
    require_order(log)
    assert accepted(log)


def test_a_run_killed_before_run_start_starts_over(log: Path) -> None:
    open_log(log, 0, Clock()).close()
    finish(log, 0)
    assert events(log)[0]["time_ms"] >= 1000 * RESUMED
    require_order(log)
    assert accepted(log)


def test_a_lost_beginning_is_not_recreated(log: Path) -> None:
    finish(log, SAVED)
    assert "run_start" not in {event["key"] for event in events(log)}
    result = check(log)
    assert not result.success
    assert any("lost before the run resumed" in text for text in result.explanations)


def test_a_silent_log_writes_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = MLPerfLog(None, stdout=False)
    log.ready()
    log.block_start(0)
    log.run_stop("aborted", 0)
    log.close()
    assert capfd.readouterr().out == ""


def test_an_unwritable_log_raises_storage_error(log: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing/mlperf\.log: cannot be written"):
        MLPerfLog(tmp_path / "missing" / "mlperf.log", stdout=False)


def test_a_closed_stdout_does_not_stop_the_run(log: Path) -> None:
    stdout, (read, write) = os.dup(1), os.pipe()
    os.dup2(write, 1)
    os.close(read)
    try:
        silent = MLPerfLog(log, stdout=True)
        silent.block_start(0)
        silent.block_stop(1)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(write)
    assert [event["key"] for event in events(log)] == ["block_start", "block_stop"]


EXPLAINED: list[tuple[str, object, str]] = [
    ("opt_adamw_weight_decay", 0.01, "is 0.01; allowed: exactly 0.1; set spec.run.optim.weight_de"),
    ("opt_adamw_weight_decay", "0.1", "is '0.1'; allowed: exactly 0.1"),
    ("evaluation_frequency", 1000, "with global_batch_size 1024 ruleset 6.1.0 allows 262144 only"),
    ("lowest_numerical_precision_in_attn", "bf16", "is 'bf16'; allowed: fp64, fp32"),
    ("tensor_parallelism", 0, "an axis that is not used is 1"),
    ("submission_org", "", "set spec.run.logging.mlperf.organization"),
    ("eval_accuracy", 0.6, "target was not reached: eval_accuracy was 0.6 at best, after 262144"),
    ("eval_accuracy", None, "is None, not a number; the checker crashed on it"),
    ("eval_accuracy", "0.5", "is '0.5', not a number; the checker crashed on it"),
    ("submission_division", "ajar", "is 'ajar'; allowed: closed or open"),
    ("submission_benchmark", "sd", "is 'sd'; allowed: flux1"),
    ("submission_division", "../../tmp/x", "a path; the checker was not run"),
    ("global_batch_size", 0, "global_batch_size (line"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value", "text"), EXPLAINED)
def test_a_wrong_value_is_explained(complete: Path, key: str, value: object, text: str) -> None:
    def set_value(logged: list[Event]) -> None:
        for event in logged:
            if event["key"] == key:
                event["value"] = value

    result = check(edited(complete, set_value))
    assert not result.success
    assert text in "\n".join(result.explanations)
    assert f"{key} (line " in render(result) or "target was not reached" in render(result)


def taken(logged: list[Event], key: str) -> Event:
    """Remove the event ``key`` and return it."""
    return logged.pop([event["key"] for event in logged].index(key))


MUTATIONS: list[tuple[Change, str]] = [
    (lambda logged: logged[10].pop("metadata"), "line 11 cannot be read (no metadata)"),
    (
        lambda logged: logged[1].update(time_ms=logged[1]["time_ms"] - 31 * 60_000),
        "the closed division allows less than 30",
    ),
    (
        lambda logged: logged.append(taken(logged, "submission_division")),
        "is before submission_division, which sets its time limit",
    ),
    (
        lambda logged: logged.insert(0, taken(logged, "evaluation_frequency")),
        "global_batch_size must come before it",
    ),
    (
        lambda logged: logged.extend(logged[:]),
        "is after init_stop or run_start: the file contains two runs",
    ),
    (lambda logged: delitem(logged, slice(20)), "keys are missing"),
    (lambda logged: logged.pop(), "run_stop is missing; the run is not over"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "text"), MUTATIONS)
def test_a_wrong_order_is_explained(complete: Path, change: Change, text: str) -> None:
    result = check(edited(complete, change))
    assert not result.success
    assert text in "\n".join(result.explanations)


def test_text_after_the_json_is_explained(complete: Path) -> None:
    complete.write_text(complete.read_text().replace('"flux1", ', '"flux1", \x1b[31m', 1))
    (text, *_) = check(complete).explanations
    assert text.startswith("line 3 cannot be read")
    assert "\x1b" not in text


def test_colours_on_each_line_are_explained_by_the_first_lines(complete: Path) -> None:
    lines = complete.read_text().splitlines()
    complete.write_text("".join(f"\x1b[32m{line}\x1b[0m\n" for line in lines))
    texts = check(complete).explanations
    assert texts[3].startswith("line 4 cannot be read")
    assert texts[4] == f"{len(lines) - 4} more lines cannot be read"
    (result,) = read_results([complete])
    found = [each for each in rule_findings(result.runs[0]) if each.rule == "readable-lines"]
    assert [each.text for each in found[4:]] == [
        f"{len(lines) - 4} more are no event, or more than one"
    ]


def test_of_five_unreadable_lines_the_fifth_is_counted(complete: Path) -> None:
    lines = complete.read_text().splitlines()
    for number in range(5):
        lines[number] += "x"
        complete.write_text("\n".join(lines))
        texts = [text for text in check(complete).explanations if "be read" in text]
        assert len(texts) == number + 1
    assert texts[4] == "1 more line cannot be read"


def test_other_text_around_the_lines_is_ignored(complete: Path) -> None:
    lines = complete.read_text().splitlines()
    complete.write_text("".join(f"chatter\n[default0]: {line}\r\n" for line in lines))
    assert check(complete).success


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "no such file"), (b"", "the file is empty"), (b"\x7fELF\0\0", "not a text file")],
)
def test_an_unreadable_file_raises_config_error(
    log: Path, content: bytes | None, text: str
) -> None:
    if content is not None:
        log.write_bytes(content)
    with pytest.raises(ConfigError, match=f"LOG: got .*{text}"):
        check(log)


def test_a_folder_a_huge_file_and_an_unknown_ruleset_are_refused(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a file"):
        check(tmp_path)
    huge = tmp_path / "huge.log"
    with huge.open("wb") as file:
        file.truncate(300 * 2**20)
    with pytest.raises(ConfigError, match="a log has at most"):
        check(huge)
    with pytest.raises(ConfigError, match=r"--ruleset: got '4.1.0'; allowed: 5.1.0, 6.0.0, 6.1.0"):
        check(huge, "4.1.0")


def test_a_text_without_log_lines_is_explained(log: Path) -> None:
    log.write_text("hello\n")
    result = check(log)
    assert not result.success
    assert "this is not an MLPerf log" in result.explanations[0]
