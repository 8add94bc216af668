"""`fluxtrain mlperf review`: every broken log, result and package of the tables is found by its rule."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.paths import ROOT
from tests.trainer.mlperf.good_run import (
    EVERY,
    SIZE,
    SYSTEM,
    Break,
    Evidence,
    by_rule,
    good_run,
    later,
    meta,
    published,
    value,
    write_run,
)

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.mlperf.evidence import Result
from fluxtrain.mlperf.review import package_rules, plausibility, run_rules
from fluxtrain.mlperf.review.review import RULES, parse, result_findings, rule_findings

HOUR = 3_600_000


def drop(*keys: str, number: int = 0) -> Break:
    return lambda run: [run.events.remove(run.one(key, number)) for key in keys]


def move(key: str, before: str, number: int = 0) -> Break:
    """Move an event before another, with the other's time."""

    def change(run: Evidence) -> None:
        event = run.one(key, number)
        run.events.remove(event)
        at = run.at(before)
        run.events.insert(at, event | {"time_ms": run.events[at]["time_ms"]})

    return change


NO_SEEDS = (None, True, 7.5, "seven", "", [7], float("nan"), float("inf"))


def again(key: str, after: str, number: int = 0, **changed: Any) -> Break:
    """Repeat an event after another, with the other's time."""

    def change(run: Evidence) -> None:
        at = run.at(after, number)
        event = run.one(key) | {"time_ms": run.events[at]["time_ms"]} | changed
        run.events.insert(at + 1, event)

    return change


def field(path: str, given: Any) -> Break:
    """Change a field of config.json."""

    def change(run: Evidence) -> None:
        *parents, name = path.split(".")
        values = run.config
        for parent in parents:
            values = values[parent]
        values[name] = given

    return change


def both(*changes: Break) -> Break:
    return lambda run: [change(run) for change in changes]


def without_evaluations(*numbers: int) -> Break:
    """Remove whole evaluations, and the blocks' ends around them, as if there was one long block."""

    def change(run: Evidence) -> None:
        keys = ("block_stop", "eval_start", "eval_accuracy", "eval_stop")
        gone = [run.one(key, number) for number in numbers for key in keys]
        gone += [run.one("block_start", number + 1) for number in numbers]
        run.events = [event for event in run.events if event not in gone]

    return change


def shift_samples(by: int, *keys: str) -> Break:
    def change(run: Evidence) -> None:
        for event in run.events:
            if event["key"] in keys:
                event["metadata"]["samples_count"] += by

    return change


def after_the_target(run: Evidence) -> None:
    run.one("eval_accuracy", 1)["value"] = 0.58


def leaves_the_division(run: Evidence) -> None:
    event = {"key": "fluxtrain_division", "value": {"division": "open", "rules": ["6.6"]}}
    run.events.insert(run.at("block_start", 2), run.one("block_start", 2) | event)


def resumed(ranks: int) -> Break:
    def change(run: Evidence) -> None:
        at = run.at("block_start", 2)
        event = run.events[at]
        metadata = {"samples_count": event["metadata"]["samples_count"]}
        news = {"key": "run_resumed", "value": {"num_ranks": ranks}, "metadata": metadata}
        run.events.insert(at, event | news)

    return change


BROKEN_LOGS: dict[str, dict[str, Break]] = {
    "evaluation-cadence": {
        "half of the evaluations are missing": without_evaluations(0, 2),
        "the first evaluation is missing": without_evaluations(0),
        "the last evaluation is off the cadence": both(
            meta("eval_accuracy", "samples_count", 4 * EVERY + SIZE, 3),
            meta("eval_start", "samples_count", 4 * EVERY + SIZE, 3),
            meta("block_stop", "samples_count", 4 * EVERY + SIZE, 3),
            meta("run_stop", "samples_count", 4 * EVERY + SIZE),
        ),
        "an evaluation twice": again("eval_accuracy", "eval_accuracy"),
        "an evaluation before the first step": again(
            "eval_accuracy", "run_start", metadata={"samples_count": 0}
        ),
        "an evaluation without samples": lambda run: run.one("eval_accuracy")["metadata"].pop(
            "samples_count"
        ),
        "every second sample counted": shift_samples(EVERY // 2, "eval_accuracy"),
    },
    "evaluation-is-a-number": {
        "a NaN evaluation": value("eval_accuracy", math.nan, 1),
        "an infinite evaluation": value("eval_accuracy", math.inf, 1),
        "an evaluation of 0": value("eval_accuracy", 0.0, 1),
        "a negative evaluation": value("eval_accuracy", -0.1, 1),
        "an evaluation in words": value("eval_accuracy", "0.58", 1),
        "an evaluation without a value": value("eval_accuracy", None, 1),
        "an evaluation that is true": value("eval_accuracy", True, 1),
    },
    "whole-evaluation-set": {
        "64 validation samples": value("eval_samples", 64),
        "one validation sample less": value("eval_samples", 29_695),
        "one evaluation over a part": meta("eval_accuracy", "eval_samples", 184, 2),
    },
    "target-of-the-benchmark": {"an easier target": value("target_accuracy", 0.6)},
    "evaluation-takes-time": {
        "an evaluation in no time": lambda run: run.one("eval_accuracy").update(
            time_ms=run.one("eval_start")["time_ms"]
        ),
    },
    "training-set": {
        "4,096 training samples": value("train_samples", 4096),
        "training samples unknown": value("train_samples", None),
    },
    "counts-continue": {
        "shifted samples of an evaluation": shift_samples(SIZE, "eval_accuracy"),
        "shifted samples of all blocks": shift_samples(SIZE, "block_start", "block_stop"),
        "a block that starts too late": meta("block_start", "samples_count", EVERY + SIZE, 1),
        "a block that goes back": meta("block_stop", "samples_count", 0, 1),
    },
    "whole-batches": {
        "samples that are no batches": meta("eval_accuracy", "samples_count", EVERY + 1),
        "negative samples": meta("eval_accuracy", "samples_count", -SIZE),
    },
    "steps-are-samples": {"a step that is not its samples": meta("eval_start", "step", 7)},
    "end-is-the-last-evaluation": {
        "an end before the last evaluation": meta("run_stop", "samples_count", 3 * EVERY)
    },
    "one-run-per-log": {
        "a second run_start": again("run_start", "eval_stop", 1),
        "no run_start": drop("run_start"),
        "a second init_stop": again("init_stop", "init_stop"),
        "two run_stop": again("run_stop", "run_stop"),
        "no run_stop": drop("run_stop"),
    },
    "order-of-events": {
        "run_start before init_stop": move("run_start", "init_stop"),
        "init_start after init_stop": move("init_start", "run_start"),
    },
    "data-before-the-clock": {
        "a block before run_start": move("block_start", "run_start"),
        "run_start after the first evaluation": move("run_start", "eval_stop"),
    },
    "nothing-after-the-end": {
        "training after run_stop": again("block_start", "run_stop"),
        "an evaluation after run_stop": again("eval_accuracy", "run_stop"),
    },
    "clock-goes-forward": {
        "the clock goes back by eight hours": later("block_start", -8 * HOUR, 2),
        "the clock goes back by two seconds": lambda run: run.one("eval_stop", 1).update(
            time_ms=run.one("eval_accuracy", 1)["time_ms"] - 2000
        ),
        "an earlier run_stop": lambda run: run.one("run_stop").update(
            time_ms=run.one("run_start")["time_ms"] + HOUR
        ),
    },
    "no-gap-before-the-clock": {
        "an hour between init_stop and run_start": later("run_start", HOUR)
    },
    "stops-at-the-target": {"a run that goes on after its target": after_the_target},
    "status-is-true": {
        "success without a target": value("eval_accuracy", 0.59, 3),
        "aborted at the target": meta("run_stop", "status", "aborted"),
        "a status of its own": meta("run_stop", "status", "done"),
        "no status": lambda run: run.one("run_stop")["metadata"].pop("status"),
    },
    "blocks-are-whole": {
        "a missing block_stop": drop("block_stop", number=1),
        "a missing block_start": drop("block_start", number=1),
        "a missing last block_stop": drop("block_stop", number=3),
        "a missing eval_stop": drop("eval_stop", number=1),
        "a missing eval_start": drop("eval_start", number=1),
    },
    "stays-closed": {"a rule is broken on the way": leaves_the_division},
    "not-resumed": {"a resume": resumed(16)},
    "resumed-on-the-same-ranks": {"a resume on fewer ranks": resumed(8)},
    "readable-lines": {
        "half a line": lambda run: run.texts.append(':::MLLOG {"namespace": "", "time_ms": 17'),
        "a line without metadata": lambda run: run.texts.append(
            ':::MLLOG {"time_ms": 1, "key": "a", "value": 1}'
        ),
    },
    "configuration-is-valid": {
        "a rate in words": field("optim.epsilon", "small"),
        "a field of another program": field("lr", 1e-4),
    },
    "one-seed": {
        "a second seed": again("seed", "seed", value=8),
        "a second seed late in the run": again("seed", "eval_stop", value=8),
        "the same seed twice": again("seed", "seed"),
        "no seed": drop("seed"),
        **{f"the seed {given!r}": value("seed", given) for given in NO_SEEDS},
    },
    "log-is-of-its-configuration": {
        "another seed in config.json": field("seed", 8),
        "another rate in config.json": field("optim.learning_rate", 1e-3),
        "another warm-up in config.json": field("schedule.warmup_steps", 0),
        "another batch in config.json": field("schedule.global_batch_size", 1024),
        "another organisation in config.json": field("logging.mlperf.organization", "x"),
        "an open config.json": field("logging.mlperf.division", "open"),
    },
    "precision-is-stated": {
        "another precision in config.json": field("precision.compute", "float32"),
        "fp8 in config.json only": field("precision.fp8", "rowwise"),
    },
    "benchmark-configuration": {
        "config.json says micro": field("preset", "micro"),
        "a smaller model": field("model.depth", 2),
        "another epsilon of the optimizer": field("optim.epsilon", 1e-5),
        "smaller images": field("data.image_size", 128),
    },
    "benchmark-data": {"config.json says synthetic": field("data.source", "synthetic")},
    "caches-are-flushed": {
        "caches that were kept": value("cache_clear", False),
        "caches flushed in the run": move("cache_clear", "block_stop"),
    },
    "batch-is-of-its-parts": {
        "a micro batch that does not make the batch": value("micro_batch_size", 16),
        "accumulation that was not counted": value("gradient_accumulation_steps", 2),
    },
}


def rules_of(run: Evidence) -> list[str]:
    return [finding.rule for finding in rule_findings(run.run())]


def test_a_good_log_has_no_findings(good: Evidence) -> None:
    assert list(rule_findings(good.run())) == []


@pytest.mark.parametrize(("change", "rule"), by_rule(BROKEN_LOGS))
def test_a_broken_log_is_found_by_its_rule(change: Break, rule: str, good: Evidence) -> None:
    broken = good.copy()
    change(broken)
    found = [finding for finding in rule_findings(broken.run()) if finding.rule == rule]
    assert found, rules_of(broken)
    assert all(finding.text and finding.fix for finding in found)


FOREIGN: dict[str, dict[str, Break]] = {
    "evaluation-cadence": {
        "an evaluation after 10^18 samples": meta(
            "eval_accuracy", "samples_count", SIZE * 10**15, 3
        ),
    },
    "evaluation-is-a-number": {
        "a loss of 400 digits": value("eval_accuracy", 10**400, 1),
        "a negative loss of 400 digits": value("eval_accuracy", -(10**400), 1),
    },
    "benchmark-configuration": {"a preset that is a list": field("preset", ["micro"])},
}
"""Values that no trainer of ours writes."""


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("change", "rule"), by_rule(FOREIGN))
def test_a_foreign_value_is_a_finding_and_not_a_crash(
    change: Break, rule: str, good: Evidence
) -> None:
    broken = good.copy()
    change(broken)
    assert rule in rules_of(broken)


@pytest.mark.parametrize("nodes", ["9" * 5000, "two", "", "-2", None])
def test_a_number_of_nodes_that_is_none_is_no_crash(nodes: str | None, good: Evidence) -> None:
    broken = good.copy()
    broken.one("fluxtrain_system")["value"]["number_of_nodes"] = nodes
    assert rules_of(broken) == []


@pytest.mark.parametrize(
    ("size", "evaluations"), [(512, 27), (1024, 31), (2048, 38), (2304, 44), (4096, 60)]
)
def test_a_log_in_the_form_of_published_ones_has_no_findings(size: int, evaluations: int) -> None:
    assert list(rule_findings(Evidence(list(published(size, evaluations)), {}).run())) == []


def test_blocks_of_published_logs_must_have_the_length_of_the_cadence() -> None:
    run = Evidence(list(published(2304, 5)), {})
    for key in ("block_start", "block_stop"):
        run.one(key, 2)["metadata"]["samples_count"] = EVERY
    assert rules_of(run) == ["whole-batches", "counts-continue"]


def test_an_open_log_needs_no_values_of_the_benchmark(tmp_path: Path) -> None:
    changes = {"preset": "micro", "logging": {"mlperf": {"division": "open"}}}
    run = good_run(tmp_path, **changes)
    for key, given in {
        "train_samples": 4096,
        "eval_samples": 64,
        "target_accuracy": None,
        "cache_clear": False,
    }.items():
        run.one(key)["value"] = given
    assert rules_of(run) == []


# Ten runs


def of_run(number: int, change: Break) -> Callable[[list[Evidence]], object]:
    return lambda runs: change(runs[number])


BROKEN_RESULTS: dict[str, dict[str, Callable[[list[Evidence]], object]]] = {
    "ten-runs": {
        "nine runs": lambda runs: runs.pop(),
        "eleven runs": lambda runs: runs.append(runs[0].copy()),
    },
    "converged-runs": {
        "two runs that did not converge": lambda runs: [
            meta("run_stop", "status", "aborted")(run) for run in runs[2:4]
        ],
    },
    "same-settings": {
        "another rate in one run": of_run(3, value("opt_base_learning_rate", 1e-4)),
        "another precision in one run": of_run(
            3, value("lowest_numerical_precision_in_linear", "fp8")
        ),
        "another micro batch in one run": of_run(3, value("micro_batch_size", 16)),
        "no warm-up in one run": of_run(3, drop("opt_learning_rate_warmup_steps")),
    },
    "same-submission": {
        "another batch in one run": of_run(3, value("global_batch_size", 1024)),
        "an open run among them": of_run(3, value("submission_division", "open")),
    },
    "same-configuration": {
        "another data order in one run": of_run(3, field("data.num_workers", 3))
    },
    "same-system": {
        "fewer nodes in one run": of_run(
            3, lambda run: run.one("fluxtrain_system")["value"].update(number_of_nodes="1")
        ),
        "other software in one run": of_run(
            3, lambda run: run.one("fluxtrain_system")["value"].update(framework="PyTorch 2.14")
        ),
    },
    "seeds-are-random": {
        "no seed in one run": of_run(3, drop("seed")),
        "a seed twice": of_run(3, value("seed", 101)),
        "a seed twice, once in words": of_run(3, value("seed", "101")),
        "a second seed that is another run's": of_run(3, again("seed", "seed", value=101)),
        "the default seed": of_run(3, value("seed", 1234)),
    },
    "runs-are-different-runs": {
        "a run twice": lambda runs: runs.__setitem__(3, runs[4].copy()),
        "the losses of another run": lambda runs: [
            event.update(value=other["value"])
            for event, other in zip(
                runs[7].all("eval_accuracy"), runs[6].all("eval_accuracy"), strict=True
            )
        ],
    },
    "converges-as-the-reference": {
        "faster than the reference": lambda runs: [
            run.one("eval_accuracy", -1)["metadata"].update(samples_count=20 * EVERY)
            for run in runs
        ],
    },
}


@pytest.mark.slow
def test_runs_faster_than_the_reference_are_told_its_schedule(ten: list[Evidence]) -> None:
    runs = [run.copy() for run in ten]
    for run in runs:
        run.one("eval_accuracy", -1)["metadata"].update(samples_count=20 * EVERY)
    texts = [finding.text for finding in result_findings(result_of(runs))]
    (text,) = [text for text in texts if text.startswith("refused: ")]
    assert text.endswith(
        "its runs of batch size 512 have learning rate 0.0002 after 1600 warm-up steps"
    )


def result_of(runs: Sequence[Evidence], **more: Any) -> Result:
    return Result("result", [run.run(f"run {number}") for number, run in enumerate(runs)], **more)


def test_ten_good_runs_have_no_findings(ten: list[Evidence]) -> None:
    assert list(result_findings(result_of(ten))) == []


@pytest.mark.slow
@pytest.mark.parametrize(("change", "rule"), by_rule(BROKEN_RESULTS))
def test_a_broken_result_is_found_by_its_rule(
    change: Callable[[list[Evidence]], object], rule: str, ten: list[Evidence]
) -> None:
    runs = [run.copy() for run in ten]
    change(runs)
    found = [finding for finding in result_findings(result_of(runs)) if finding.rule == rule]
    assert found
    assert all(finding.text and finding.fix for finding in found)


DESCRIPTION = {
    "submitter": "example-org",
    "division": "closed",
    "status": "Available on-premise",
    **SYSTEM,
}


@pytest.mark.parametrize(
    ("field", "given", "rule"),
    [
        ("submitter", "another-org", "description-is-of-the-logs"),
        ("division", "open", "description-is-of-the-logs"),
        ("status", "Preview", "description-is-of-the-logs"),
        ("number_of_nodes", "4", "description-is-of-the-nodes"),
        ("accelerator_model_name", "AMD Instinct MI355X", "description-is-of-the-nodes"),
        ("framework", "PyTorch 2.14.0", "description-is-of-the-nodes"),
    ],
)
def test_a_description_of_another_system_is_found(
    field: str, given: str, rule: str, ten: list[Evidence], tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text("code")
    parts = {"implementation": tmp_path}
    assert list(result_findings(result_of(ten, description=DESCRIPTION, **parts))) == []
    found = result_findings(result_of(ten, description={**DESCRIPTION, field: given}, **parts))
    of_each = "description-is-of-each-node"
    assert [finding.rule for finding in found if finding.rule != of_each] == [rule]


def test_accelerators_of_a_description_that_do_not_make_the_batch_are_found(
    ten: list[Evidence], tmp_path: Path
) -> None:
    """Of other submitters' logs, which do not have the nodes' own words."""
    (tmp_path / "README.md").write_text("code")
    runs = [run.copy() for run in ten]
    for run in runs:
        run.events = [event for event in run.events if "fluxtrain" not in event["key"]]
    description = {**DESCRIPTION, "number_of_nodes": "3"}
    result = result_of(runs, description=description, implementation=tmp_path)
    found, note = result_findings(result)
    assert (note.rule, note.kind) == ("caches-of-each-node", "note")
    assert found.rule == "accelerators-make-the-batch"
    assert "x 24 ranks of the description is 768, global_batch_size is 512" in found.text


def test_files_that_are_missing_from_a_package_are_found(
    ten: list[Evidence], tmp_path: Path
) -> None:
    def names(runs: Sequence[Evidence], folder: Path | None) -> list[str]:
        result = result_of(runs, description=DESCRIPTION, implementation=folder)
        return [finding.rule for finding in result_findings(result)]

    assert names(ten, None) == ["code-is-enclosed"]
    assert names(ten, tmp_path) == ["code-is-enclosed"]
    (tmp_path / "README.md").write_text("code")
    other = [run.copy() for run in ten]
    for run in other:
        run.one("config_filename")["value"] = "config_16.sh"
    assert names(other, tmp_path) == ["configuration-is-enclosed"]
    (tmp_path / "config_16.sh").write_text("")
    assert names(other, tmp_path) == []
    for run in other:
        run.one("config_filename")["value"] = "/workspace/config_16.sh"
    assert names(other, tmp_path) == [], "a path of the machine that trained"
    for name in ("", "/", "..", "/etc/passwd", "config_*.sh", "a\0b"):
        for run in other:
            run.one("config_filename")["value"] = name
        assert names(other, tmp_path) == ["configuration-is-enclosed"]


# The commands


def break_log(folder: Path, old: str, new: str) -> None:
    log = folder / "mlperf.log"
    assert old in log.read_text()
    log.write_text(log.read_text().replace(old, new))


def test_a_good_run_is_reviewed_as_a_folder_and_as_a_log(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    run = write_run(tmp_path / "run", 7)
    for path in (run, run / "mlperf.log"):
        assert f"PASSED: {len(RULES)} rules, 1 log, ruleset 6.1.0" in mlperf(
            EXIT_OK, "review", path
        )


def test_review_names_the_rule_its_section_the_log_and_what_to_do(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    run = write_run(tmp_path / "run", 7)
    break_log(run, '"key": "eval_samples", "value": 29696', '"key": "eval_samples", "value": 64')
    output = mlperf(EXIT_ERROR, "review", run)
    assert "FAILED: 1 finding in 1 log" in output
    assert f"1. whole-evaluation-set (training rules 9.4): {run}: eval_samples (line" in output
    assert "is over 64 samples; needed: 29696. Use the whole of" in output
    output = mlperf(EXIT_ERROR, "check", run / "mlperf.log")
    assert output.startswith("SUCCESS")
    assert "whole-evaluation-set (training rules 9.4)" in output


def test_the_same_finding_in_many_logs_is_one_paragraph(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    runs = [write_run(tmp_path / f"run_{number}", number, 20 + number) for number in range(1, 5)]
    for run in runs:
        break_log(
            run, '"key": "train_samples", "value": 1099776', '"key": "train_samples", "value": 5'
        )
    output = mlperf(EXIT_ERROR, "review", *runs)
    assert f"{runs[0]}, {runs[1]}, {runs[2]} and 1 more: train_samples" in output
    assert "ten-runs (training rules 12): 4 runs; needed: 10" in output


@pytest.mark.slow
@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("a", "b", "b"), ("a", "b", "c", "d")])
@pytest.mark.parametrize("distinct", [False, True])
def test_as_many_findings_are_counted_as_numbered(
    names: tuple[str, ...], distinct: bool, tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    for number, name in enumerate(dict.fromkeys(names), 1):
        run = write_run(tmp_path / name, 1000 + number)
        given = number if distinct else 5
        break_log(run, '"train_samples", "value": 1099776', f'"train_samples", "value": {given}')
        break_log(run, '"eval_samples", "value": 29696', '"eval_samples", "value": 5')
    output = mlperf(EXIT_ERROR, "review", *(str(tmp_path / name) for name in names))
    numbered = [line for line in output.splitlines() if re.match(r"  \d+\. ", line)]
    assert output.startswith(f"FAILED: {len(numbered)} finding")
    assert numbered[-1].startswith(f"  {len(numbered)}. ")
    assert f"{tmp_path / 'b'}, {tmp_path / 'b'}: " not in output


def test_a_seed_other_than_the_drawn_one_is_found(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    run = write_run(tmp_path / "run", 7)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"seed": "random"}))
    (run / "seed").write_text("7\n")
    assert main(["mlperf", "review", str(run)]) == EXIT_OK
    (run / "seed").write_text("8\n")
    assert "is 7; drawn for this output, in its file seed: 8" in mlperf(EXIT_ERROR, "review", run)


def test_a_second_seed_of_an_open_log_is_found_too(tmp_path: Path) -> None:
    run = good_run(tmp_path, preset="micro", logging={"mlperf": {"division": "open"}})
    again("seed", "seed", value=8)(run)
    assert "one-seed" in rules_of(run)
    drop("seed")(run)
    drop("seed")(run)
    assert "one-seed" not in rules_of(run)


def test_what_the_compliance_checker_says_is_a_finding(
    tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    run = write_run(tmp_path / "run", 7)
    log = run / "mlperf.log"
    lines = log.read_text().splitlines(keepends=True)
    once = next(line for line in lines if '"opt_name"' in line)
    log.write_text("".join(line * 2 if line == once else line for line in lines))  # a warning only
    assert "compliance-checker" in mlperf(EXIT_ERROR, "review", run)
    log.write_text("".join(line for line in lines if line != once))
    assert "compliance-checker: " in mlperf(EXIT_ERROR, "review", run)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no log, no output folder"), ("{", "is not JSON"), ("[]", "is not a JSON object")],
)
def test_a_path_that_cannot_be_reviewed_is_refused(
    content: str | None, message: str, tmp_path: Path, mlperf: Callable[..., str]
) -> None:
    path = tmp_path / "run"
    if content is None:
        path.mkdir()
    else:
        (write_run(path, 7) / "config.json").write_text(content)
    assert message in mlperf(EXIT_USAGE, "review", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("same-settings", "RULE=REASON"),
        ("same-settings= ", "RULE=REASON"),
        ("ten-runs=two nodes burnt", "cannot be waived"),
        ("no-rule=x", "no rule of that name"),
    ],
)
def test_a_waiver_needs_a_rule_and_a_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse([text])
    assert parse(["same-settings=two nodes burnt"]) == {"same-settings": "two nodes burnt"}


def test_every_rule_is_in_the_documentation() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \|.*\. \|$", (ROOT / "docs" / "review.md").read_text(), re.MULTILINE
    )
    assert sorted(rows) == sorted(RULES)


def test_every_rule_is_in_a_table() -> None:
    """But for the checkers' and those of plausibility, which have tests of their own."""
    elsewhere = (*package_rules.RULES, run_rules.log_follows_its_chain)
    of_packages = {"median-of-the-windows", *(rule.name for rule in elsewhere)}
    notes = {rule.name for rule in (*plausibility.RUN_RULES, *plausibility.RESULT_RULES)}
    assert RULES - {*BROKEN_LOGS, *BROKEN_RESULTS} - notes == of_packages | {
        "compliance-checker",
        "package-checkers",
    }
