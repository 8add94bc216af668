"""Rules on the runs of one result: the same system and settings, seeds of their own, convergence."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from fluxtrain.contract.run.closed_division import REFERENCE_SCHEDULES
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.mlperf.evidence import FailedRun, Result, Run, chain_of, is_file
from fluxtrain.mlperf.facts import DATA_KEY
from fluxtrain.mlperf.log_lines import is_number
from fluxtrain.mlperf.rcp import NUM_RUNS, compare_with_reference, explain, median_window
from fluxtrain.runtime.progress import first_of

T = TypeVar("T")
_UNNAMED = re.compile(r"placeholder|change.?me|to.?do\b|\btbd\b|<.*>|\byour[_ -]", re.IGNORECASE)
Check = Callable[[T], Iterator[str]]
Kind = Literal["finding", "note", "unknown"]
"""A finding breaks a rule, a note is what a reviewer asks about, unknown is what the files cannot show."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, to be asked or unknown, in which run or result, and what to do."""

    rule: str
    section: str
    """Of MLCommons' training rules; empty for a rule of its submission rules or checkers."""
    place: str
    text: str
    fix: str
    kind: Kind = "finding"


@dataclass(frozen=True)
class Rule(Generic[T]):
    """A named rule for one run or for one result; ``check`` yields a text per finding."""

    section: str
    fix: str
    check: Check[T]
    closed_only: bool
    kind: Kind
    needs: str
    """A name of `EVIDENCE`, without which the rule's answer is unknown."""

    @property
    def name(self) -> str:
        """Return the name of the check, in hyphens."""
        return self.check.__name__.replace("_", "-")

    def findings(self, subject: T, place: str, closed: bool) -> Iterator[Finding]:
        """Yield what the rule finds in ``subject``, which is of the closed division or not."""
        if self.closed_only and not closed:
            return
        for text in self.check(subject):
            yield Finding(self.name, self.section, place, text, self.fix, self.kind)


def rule(
    section: str,
    fix: str,
    closed_only: bool = False,
    kind: Kind = "finding",
    needs: str = "",
) -> Callable[[Check[T]], Rule[T]]:
    def decorate(check: Check[T]) -> Rule[T]:
        return Rule(section, fix, check, closed_only, kind, needs)

    return decorate


EVIDENCE: dict[str, Callable[[Run], bool]] = {
    "config.json": lambda run: run.config is not None,
    "chain.jsonl": lambda run: (path := chain_of(run)) is not None and is_file(path),
    "report of the nodes": lambda run: bool(run.system),
    "validation_time": lambda run: bool(measured(run, "validation_time")),
}
"""What rules need of a run, beside its events."""


def measured(run: Run, name: str) -> list[float]:
    """Return the values above 0 that a run measured itself and logged in `tracked_stats`."""
    stats = [line.value for line in run.all("tracked_stats") if isinstance(line.value, dict)]
    found = [each[name] for each in stats if is_number(each.get(name))]
    return [float(value) for value in found if value > 0]


def rules_in(module: Mapping[str, object]) -> tuple[Rule[Any], ...]:
    """Return the rules among the names of ``module``, in their order."""
    return tuple(value for value in module.values() if isinstance(value, Rule))


SUBMISSION = (
    *("submission_org", "submission_platform", "submission_division", "submission_status"),
    "global_batch_size",
)
"""Keys that name the result: MLCommons' tools need them equal in its runs."""
SETTINGS = (
    *("micro_batch_size", "gradient_accumulation_steps"),
    *("opt_name", "opt_adamw_beta_1", "opt_adamw_beta_2", "opt_adamw_epsilon"),
    *("opt_adamw_weight_decay", "opt_gradient_clip_norm", "opt_base_learning_rate"),
    *("opt_learning_rate_warmup_steps", "opt_learning_rate_decay_schedule", "evaluation_frequency"),
    *("lowest_numerical_precision_in_linear", "lowest_numerical_precision_in_attn"),
    *("lowest_numerical_precision_in_comm", "train_samples", "eval_samples", "target_accuracy"),
    DATA_KEY,
    *(f"{axis}_parallelism" for axis in ("tensor", "pipeline", "context", "expert")),
)
"""Keys whose values are the same in all runs of a result."""
_DEFAULT_SEED = RunConfig.model_fields["seed"].default
_MAX_NAMES = 4
_OWN = ("seed", "output")
"""Fields of the configuration that are each run's own."""
_SAME = "Give runs of one result: the same system, software and settings, and a seed for each."


def is_unnamed(value: object) -> bool:
    """Return whether a name is left empty, or is a placeholder of a script."""
    return value in (None, "") or _UNNAMED.search(str(value)) is not None


@rule(
    "12",
    f"Give {NUM_RUNS} runs: a result is the mean of {NUM_RUNS - 2} of them. A campaign gets more with "
    "fluxtrain mlperf campaign FILE --runs N --apply.",
)
def ten_runs(result: Result) -> Iterator[str]:
    """A result has ten runs; nobody can waive this."""
    if (count := len(result.runs)) != NUM_RUNS:
        which = ", the consecutive ones with the median score" if count > NUM_RUNS else ""
        yield f"{count} runs; needed: {NUM_RUNS}{which}"


@rule("12", "Package all runs with fluxtrain mlperf package, which takes the ten that count.")
def median_of_the_windows(result: Result) -> Iterator[str]:
    """Of more than ten runs the result is the consecutive ten with the median score."""
    if not result.others:
        return
    every = [*result.runs, *result.others]
    window = median_window(every)
    if {id(run) for run in window} != {id(run) for run in result.runs}:
        first, last = window[0].name, window[-1].name
        yield f"of {len(every)} runs, the ten from {first} to {last} have the median score, not these"


@rule("12", "Repeat; a second run without convergence makes the result invalid.")
def converged_runs(result: Result) -> Iterator[str]:
    """One run at most did not reach the target; a failed one counts if it diverged or took longest."""
    lost = [run.name for run in result.runs if not run.succeeded]
    lost += [run.name for run in result.failed if _did_not_converge(run, result)]
    if len(lost) > 1:
        yield f"{len(lost)} runs did not reach the target: {first_of(lost, _MAX_NAMES)}"


@rule("2.2", _SAME)
def same_submission(result: Result) -> Iterator[str]:
    """The logs have the same submitter, platform, division, status and global batch size."""
    for key in SUBMISSION:
        yield from _differences(key, {run.name: run.value(key) for run in result.runs})


@rule("2.2", _SAME)
def same_settings(result: Result) -> Iterator[str]:
    """Micro batch, optimizer, schedule, precision and parallelism are equal in all logs."""
    for key in SETTINGS:
        yield from _differences(key, {run.name: run.value(key) for run in result.runs})


@rule("2.2", _SAME)
def same_configuration(result: Result) -> Iterator[str]:
    """The `config.json` of the runs are equal, but for the seed and the output."""
    configured = [run for run in result.runs if run.config is not None]
    fields = sorted({name for run in configured for name in run.config or {}} - set(_OWN))
    for field in fields:
        yield from _differences(
            f"{field} in config.json",
            {run.name: (run.config or {}).get(field) for run in configured},
        )


@rule("2.2", _SAME)
def same_system(result: Result) -> Iterator[str]:
    """The nodes' own reports are equal: their number, hardware, software."""
    described = [run for run in result.runs if run.system]
    for field in sorted({name for run in described for name in run.system}):
        yield from _differences(field, {run.name: run.system.get(field) for run in described})


@rule("5.1", "Draw each run's seed from the clock or the system's randomness.", closed_only=True)
def seeds_are_random(result: Result) -> Iterator[str]:
    """Each run has a seed of its own, not the default one."""
    found: dict[str, list[str]] = defaultdict(list)
    for run in result.runs:
        logged = [line.value for line in run.all("seed") if line.value is not None]
        seeds = list(dict.fromkeys(map(str, logged)))
        if not seeds:
            yield f"{run.name} has no seed"
        if str(_DEFAULT_SEED) in seeds:
            yield f"{run.name} has the default seed {_DEFAULT_SEED}, a constant"
        for seed in seeds:
            found[seed].append(run.name)
    for seed, names in found.items():
        if len(names) > 1:
            yield f"the seed {seed} is that of {first_of(names, _MAX_NAMES)}"


@rule("12", "Give each run once.")
def runs_are_different_runs(result: Result) -> Iterator[str]:
    """No two logs are of the same run."""
    marks: tuple[tuple[str, Callable[[Run], object]], ...] = (
        ("start at the same millisecond", _start),
        ("have the same losses", _losses),
    )
    for what, mark in marks:
        same: dict[object, list[str]] = defaultdict(list)
        for run in result.runs:
            if (value := mark(run)) is not None:
                same[value].append(run.name)
        for names in same.values():
            if len(names) > 1:
                yield f"{first_of(names, _MAX_NAMES)} {what}"


@rule(
    "13",
    "Look for a difference from the reference (learning rate, data order, evaluation), or supply reference "
    "runs of your own.",
    closed_only=True,
)
def converges_as_the_reference(result: Result) -> Iterator[str]:
    """The mean of the samples is not below what the reference's points allow."""
    size = result.runs[0].number("global_batch_size")
    if len(result.runs) != NUM_RUNS or size is None:
        return
    samples = [run.samples for run in result.runs]
    compared = compare_with_reference(samples, size, result.ruleset)
    if not compared.accepted:
        schedule = REFERENCE_SCHEDULES.get(size)
        text = "" if schedule is None else f"; its runs of batch size {size} have {schedule}"
        yield explain(compared, size, result.ruleset) + text


RULES: tuple[Rule[Result], ...] = rules_in(globals())
OF_ALL_RUNS = (same_submission, seeds_are_random, runs_are_different_runs)
"""Rules without which runs are no result, also for those of more than ten that do not count."""
OF_ONE_RESULT = (ten_runs, converged_runs)
"""The same, for the ten."""


def _did_not_converge(failed: FailedRun, result: Result) -> bool:
    """Return whether a failed run diverged, or was evaluated beyond the samples of the slowest run."""
    if failed.diverged or failed.log is None:
        return failed.diverged
    evaluated = [line.samples or 0 for line in failed.log.all("eval_accuracy")]
    converged = [run.samples for run in result.runs if run.samples is not None]
    return bool(converged) and max(evaluated, default=0) > max(converged)


def _differences(what: str, values: Mapping[str, object]) -> Iterator[str]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        found[json.dumps(value, sort_keys=True)].append(name)
    if len(found) > 1:
        common, *others = sorted(found, key=lambda text: -len(found[text]))
        told = "; ".join(
            f"{_short(text)} in {first_of(found[text], _MAX_NAMES)}" for text in others
        )
        yield f"{what} is {_short(common)} in most runs, but {told}"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _start(run: Run) -> object:
    line = run.first("run_start")
    return None if line is None else line.fields["time_ms"]


def _losses(run: Run) -> object:
    losses = [line.value for line in run.all("eval_accuracy")]
    return tuple(map(str, losses)) if losses else None
