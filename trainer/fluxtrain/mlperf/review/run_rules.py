"""Rules on the order and the times of a run's events: one run, on a clock that is never stopped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from math import inf
from typing import Any

from fluxtrain.contract.process import CHAIN_FILE
from fluxtrain.contract.run.closed_division import FIXED_VALUES, PREFIX
from fluxtrain.contract.run.config import RANDOM_SEED, value_at
from fluxtrain.contract.run.presets import (
    MLPERF_EVALUATION_SAMPLES,
    MLPERF_TARGET_LOSS,
    MLPERF_TRAINING_SET,
    MLPERF_VALIDATION_SET,
)
from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.chain_verify import verify
from fluxtrain.mlperf.compliance import rounded
from fluxtrain.mlperf.evidence import Run, chain_of, is_file, num_ranks, read_bytes
from fluxtrain.mlperf.facts import CHAIN_KEY, DIVISION_KEY, PRECISION_NAMES
from fluxtrain.mlperf.jobs import heads_of_job
from fluxtrain.mlperf.log_lines import LogLine, reaches
from fluxtrain.mlperf.review.result_rules import Rule, rule, rules_in
from fluxtrain.state.random_seed import SEED_FILE

RUN_RESULTS = "11"
_REPEAT = "Repeat the run; the log of another cannot be mended."
_ORIGINAL = (
    "Give the original log of one run; fluxtrain writes it to mlperf.log next to the checkpoints."
)
_TRAINING = ("block_start", "block_stop", "eval_start", "eval_stop", "eval_accuracy", "run_start")
"""Events of training; statistics may come after the end of a run."""
_FIRST_MS = 1_000_000_000_000
"""In 2001: no log is older."""
_TOLERANCE_MS = 1000
"""Writers of one log may be this far apart: each node writes when it has flushed its caches."""


@rule(
    "2.2",
    "Repeat the run, with logging.mlperf.division: open if it is to be submitted there: the head of a log "
    "is not changed.",
    closed_only=True,
)
def stays_closed(run: Run) -> Iterator[str]:
    """No rule of the closed division was broken after the start."""
    head = run.first("submission_division")
    for line in run.all(DIVISION_KEY):
        rules = line.value.get("rules") if isinstance(line.value, dict) else None
        told = "; ".join(map(str, rules)) if isinstance(rules, list) else repr(rules)
        after = "" if line.samples is None else f" after {line.samples:,} samples"
        yield (
            f"{head.place if head else 'the log'} says closed, but the run left the closed division{after}, "
            f"by {line.place}: {told}"
        )


@rule("", _ORIGINAL)
def readable_lines(run: Run) -> Iterator[str]:
    """Each line with the token `:::MLLOG` is one event."""
    found = [line for line in run.lines if line.fault or line.hides]
    for line in found[:_SHOWN]:
        why = f"no event ({line.fault})" if line.fault else "more than one event"
        yield f"line {line.number} is {why}"
    if len(found) > _SHOWN:
        yield f"{len(found) - _SHOWN:,} more are no event, or more than one"


@rule(RUN_RESULTS, _ORIGINAL)
def one_run_per_log(run: Run) -> Iterator[str]:
    """A log has one `init_stop`, one `run_start` and one `run_stop`."""
    for key in ("init_stop", "run_start", "run_stop"):
        found = run.all(key)
        if len(found) != 1:
            places = ", ".join(str(line.number) for line in found) or "none"
            yield f"{key} occurs {len(found)} times (lines: {places}), allowed: once"


@rule(RUN_RESULTS, _ORIGINAL)
def order_of_events(run: Run) -> Iterator[str]:
    """The order is `init_start`, `init_stop`, `run_start`, `run_stop`."""
    order = [run.first(key) for key in ("init_start", "init_stop", "run_start", "run_stop")]
    present = [line for line in order if line is not None]
    for earlier, later in pairwise(present):
        if earlier.number > later.number:
            yield f"{earlier.place} is after {later.place}"


@rule(RUN_RESULTS, "The clock starts before any data is touched.")
def data_before_the_clock(run: Run) -> Iterator[str]:
    """Nothing is trained or evaluated before `run_start`."""
    start = run.first("run_start")
    for line in run.all(*_TRAINING[:-1]):
        if start is not None and line.number < start.number:
            yield f"{line.place} is before run_start (line {start.number})"
            return


@rule(RUN_RESULTS, _ORIGINAL)
def nothing_after_the_end(run: Run) -> Iterator[str]:
    """Nothing is trained or evaluated after `run_stop`; statistics may follow."""
    stop = run.first("run_stop")
    for line in run.all(*_TRAINING):
        if stop is not None and line.number > stop.number:
            yield f"{line.place} is after {stop.place}"
            return


@rule(RUN_RESULTS, "Keep the nodes' clocks in step (NTP, slewing). " + _REPEAT)
def clock_goes_forward(run: Run) -> Iterator[str]:
    """Each event has a time, and none is more than a second before the one above it."""
    for line in run.events:
        if line.fields["time_ms"] < _FIRST_MS:
            time = line.fields["time_ms"]
            yield f"{line.place} is at {time:g}, which is no time in milliseconds since 1970"
            return
    for earlier, later in pairwise(run.events):
        back = earlier.fields["time_ms"] - later.fields["time_ms"]
        if back > _TOLERANCE_MS:
            yield f"{later.place} is {back / 1000:,.1f} s before the event above it ({earlier.place})"


@rule(RUN_RESULTS, _REPEAT)
def no_gap_before_the_clock(run: Run) -> Iterator[str]:
    """`run_start` follows `init_stop` at once: time between them would count nowhere."""
    stop, start = run.first("init_stop"), run.first("run_start")
    if stop is None or start is None:
        return
    gap = start.fields["time_ms"] - stop.fields["time_ms"]
    if gap > _TOLERANCE_MS:
        yield (
            f"run_start is {gap / 1000:,.1f} s after init_stop: this time is in neither the "
            "initialisation nor the run"
        )


@rule(RUN_RESULTS, _REPEAT, closed_only=True)
def stops_at_the_target(run: Run) -> Iterator[str]:
    """The first evaluation that reaches the target is the last one."""
    for number, line in enumerate(evaluations := run.all("eval_accuracy")):
        if reaches(line, MLPERF_TARGET_LOSS) and number + 1 < len(evaluations):
            after = len(evaluations) - number - 1
            yield (
                f"{line.place} is {line.value:.5g}, which reaches {MLPERF_TARGET_LOSS}, but the run went on: "
                f"{after} more evaluations"
            )
            return


@rule(RUN_RESULTS, _ORIGINAL, closed_only=True)
def status_is_true(run: Run) -> Iterator[str]:
    """`success` means that the last evaluation reached the target, `aborted` that it did not."""
    stop, evaluations = run.first("run_stop"), run.all("eval_accuracy")
    if stop is None:
        return
    status = stop.fields["metadata"].get("status")
    reached = bool(evaluations) and reaches(evaluations[-1], MLPERF_TARGET_LOSS)
    if status not in ("success", "aborted"):
        yield f"{stop.place} has the status {status!r}; allowed: success, aborted"
    elif (status == "success") != reached:
        last = f"{evaluations[-1].value!r}" if evaluations else "none"
        yield (
            f"{stop.place} says {status}, but the last evaluation is {last} "
            f"(target: {MLPERF_TARGET_LOSS})"
        )


@rule(RUN_RESULTS, _ORIGINAL)
def blocks_are_whole(run: Run) -> Iterator[str]:
    """Each block of training and each evaluation has a start and a stop."""
    for kind in ("block", "eval"):
        open_line: LogLine | None = None
        for line in run.all(f"{kind}_start", f"{kind}_stop"):
            starts = line.key.endswith("_start")
            if starts == (open_line is not None):
                yield f"{line.place} has no {kind}_{'stop' if starts else 'start'} before it"
            open_line = line if starts else None
        if open_line is not None and run.first("run_stop") is not None:
            yield f"{open_line.place} has no {kind}_stop"


@rule(
    RUN_RESULTS,
    "Give a run that was not interrupted: the rules leave open whether a resumed run counts.",
    closed_only=True,
)
def not_resumed(run: Run) -> Iterator[str]:
    """The run was not interrupted: MLCommons' text leaves open whether a resumed run counts."""
    for line in run.all("run_resumed"):
        same = line.value.get("same_nodes") if isinstance(line.value, dict) else None
        where = "" if same is None else f" on {'the same' if same else 'other'} nodes"
        yield f"the run was resumed after {line.samples} samples{where} (line {line.number})"


@rule("2.2", "Repeat the run on a fixed number of nodes.", closed_only=True)
def resumed_on_the_same_ranks(run: Run) -> Iterator[str]:
    """A run keeps its number of ranks."""
    counts = [line.value.get("num_ranks") for line in run.all("run_resumed") if _is_ranks(line)]
    first = num_ranks(run.system)
    if first and counts:
        counts.insert(0, first)
    if len(set(counts)) > 1:
        yield f"the run went on with another number of ranks: {', '.join(map(str, counts))}"


def _is_ranks(line: LogLine) -> bool:
    return isinstance(line.value, dict) and isinstance(line.value.get("num_ranks"), int)


QUALITY = "9.4"
_SHOWN = 4
_WHOLE = re.compile(r"\s*[+-]?[0-9]+\s*")


@rule(
    QUALITY,
    f"Set evaluation.every_samples to {MLPERF_EVALUATION_SAMPLES}, evaluation.at_start and at_end to false, "
    "and repeat the run.",
    closed_only=True,
)
def evaluation_cadence(run: Run) -> Iterator[str]:
    """A run is evaluated each 262,144 samples, rounded up to whole batches, and nowhere else."""
    every = cadence(run)
    found = [line.samples for line in run.all("eval_accuracy")]
    if every is None or not found:
        return
    last = max((count for count in found if count is not None), default=0)
    kept = {count for count in found if count is not None and count > 0 and count % every == 0}
    if num_missing := max(0, last // every) - len(kept):
        missing = (count for count in range(every, last + 1, every) if count not in kept)
        shown = _listed(islice(missing, _SHOWN), num_missing)
        yield f"evaluations are missing at {shown} samples; one each {every:,} is needed"
    if off := [count for count in found if count not in kept]:
        yield f"evaluations at {_listed(off[:_SHOWN], len(off))} samples are not a multiple of {every:,}"
    if len(set(found)) < len(found) or found != sorted(found, key=lambda count: count or 0):
        yield "the samples of the evaluations do not increase from one to the next"


@rule(QUALITY, "Find the fault in the validation data or the model; repeat.")
def evaluation_is_a_number(run: Run) -> Iterator[str]:
    """Each evaluation has a finite loss above 0."""
    for line in run.all("eval_accuracy", "averaged_validation_loss"):
        if line.measured is None:
            yield f"{line.place} is {line.value!r}, not a number"
        elif not 0 < line.measured < inf:
            yield f"{line.place} is {line.value}"


@rule(QUALITY, "Use the whole of MLCommons' validation set.", closed_only=True)
def whole_evaluation_set(run: Run) -> Iterator[str]:
    """Each evaluation that states its samples used all 29,696."""
    counted = [(line, line.value) for line in run.all("eval_samples")]
    for line in run.all("eval_accuracy"):
        used = line.fields["metadata"].get("eval_samples")
        if used is not None:
            counted.append((line, used))
    for line, count in counted:
        if count != MLPERF_VALIDATION_SET:
            yield f"{line.place} is over {count} samples; needed: {MLPERF_VALIDATION_SET}"


@rule(
    QUALITY,
    f"Set evaluation.target_loss to {MLPERF_TARGET_LOSS} and repeat the run.",
    closed_only=True,
)
def target_of_the_benchmark(run: Run) -> Iterator[str]:
    """A stated target is the benchmark's, 0.586."""
    for line in run.all("target_accuracy"):
        if line.value != MLPERF_TARGET_LOSS:
            yield f"{line.place} is {line.value}; needed: {MLPERF_TARGET_LOSS}"


@rule(QUALITY, "Give the original log.", closed_only=True)
def evaluation_takes_time(run: Run) -> Iterator[str]:
    """No evaluation is over in the millisecond in which it starts."""
    start: LogLine | None = None
    for line in run.all("eval_start", "eval_accuracy"):
        if line.key == "eval_start":
            start = line
        elif start is not None and line.fields["time_ms"] <= start.fields["time_ms"]:
            yield (
                f"{line.place} has the time of its eval_start: {MLPERF_VALIDATION_SET} "
                "samples were evaluated in no time"
            )
            return


def cadence(run: Run) -> int | None:
    """Return the samples between two evaluations of a closed run, None without a global batch size."""
    batch = run.number("global_batch_size")
    if batch is None or batch < 1:
        return None
    return rounded(batch)


def _listed(first: Iterable[int | None], total: int) -> str:
    shown = ", ".join("no" if count is None else f"{count:,}" for count in first)
    return f"{shown} and {total - _SHOWN} more" if total > _SHOWN else shown


_COUNTED = ("block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop")
_SAMPLES_ORIGINAL = "Give the original log; fluxtrain counts each sample once."


@rule("6.5", "Train on the whole of MLCommons' training set.", closed_only=True)
def training_set(run: Run) -> Iterator[str]:
    """The training set has 1,099,776 samples."""
    for line in run.all("train_samples"):
        if line.value != MLPERF_TRAINING_SET:
            yield f"{line.place} is {line.value}; needed: {MLPERF_TRAINING_SET}"


@rule("6.6", _SAMPLES_ORIGINAL)
def whole_batches(run: Run) -> Iterator[str]:
    """Each count of samples is a number of whole batches."""
    batch = run.number("global_batch_size")
    if not batch or batch < 1:
        return
    for line in run.all(*_COUNTED):
        if line.samples is not None and (line.samples < 0 or line.samples % batch):
            yield (
                f"{line.place} is at {line.samples:,} samples, "
                f"which are not whole batches of {batch}"
            )
            return


@rule("6.6", _SAMPLES_ORIGINAL)
def counts_continue(run: Run) -> Iterator[str]:
    """A block starts where the one before it stopped, and is evaluated where it stops.

    Submitters write the length of a block into its start and its stop; both forms are known.
    """
    lines = run.all("block_start", "block_stop", "eval_start", "eval_accuracy")
    blocks = [line for line in lines if line.key.startswith("block")]
    first = [line.samples for line in blocks[:2]]
    if len(first) == 2 and first[0] and first[0] == first[1]:  # it would start at 0 otherwise
        yield from _lengths(run, blocks)
        return
    if blocks and blocks[0].key == "block_start" and blocks[0].samples:
        yield f"{blocks[0].place} is at {blocks[0].samples:,} samples; the first block starts at 0"
    for earlier, later in pairwise(lines):
        if (earlier.key, later.key) == ("block_start", "block_stop"):
            wrong = (later.samples or 0) < (earlier.samples or 0)
        else:
            wrong = later.samples != earlier.samples
        if wrong:
            yield (
                f"{later.place} is at {later.samples} samples, after {earlier.place} at {earlier.samples}"
            )
            return


@rule("6.6", _SAMPLES_ORIGINAL)
def steps_are_samples(run: Run) -> Iterator[str]:
    """A step in the metadata of an evaluation, times the batch size, is its samples."""
    batch = run.number("global_batch_size")
    for line in run.all("eval_start", "eval_stop"):
        step = line.fields["metadata"].get("step")
        if batch and isinstance(step, int) and line.samples not in (None, step * batch):
            yield f"{line.place} is at {line.samples} samples, but step {step} x {batch} is {step * batch}"
            return


@rule("11", _SAMPLES_ORIGINAL)
def end_is_the_last_evaluation(run: Run) -> Iterator[str]:
    """A run that succeeded stops at the samples of its last evaluation."""
    stop, evaluations = run.first("run_stop"), run.all("eval_accuracy")
    if stop is None or not evaluations or not run.succeeded or stop.samples is None:
        return
    if stop.samples != evaluations[-1].samples:
        yield (
            f"{stop.place} is at {stop.samples} samples, the last evaluation at "
            f"{evaluations[-1].samples}"
        )


def _lengths(run: Run, blocks: list[LogLine]) -> Iterator[str]:
    every = cadence(run) if run.closed else blocks[0].samples
    for line in blocks:
        if line.samples != every:
            yield f"{line.place} is of {line.samples} samples; the blocks of this run are of {every}"
            return


@rule("5.1", "Give the original log: fluxtrain draws and logs one seed for a run.")
def one_seed(run: Run) -> Iterator[str]:
    """A log has one seed, a whole number, the one that was drawn; an open log may have none."""
    found = run.all("seed")
    if not found and run.closed:
        yield "the log has no seed"
    for line in found:
        if not _WHOLE.fullmatch(str(line.value)):
            yield f"{line.place} is {line.value!r}; needed: a whole number"
        elif (drawn := _drawn_seed(run)) not in (None, str(line.value)):
            yield f"{line.place} is {line.value!r}; drawn for this output, in its file {SEED_FILE}: {drawn}"
    if len(found) > 1:
        shown = ", ".join(f"{line.value!r} (line {line.number})" for line in found[:_SHOWN])
        yield f"seed occurs {len(found)} times: {shown}; allowed: once"


def _drawn_seed(run: Run) -> str | None:
    """Return what the file with the seed of a run with `seed: random` holds, None without one."""
    if run.config_file is None or (run.config or {}).get("seed") != RANDOM_SEED:
        return None
    path = run.config_file.with_name(SEED_FILE)
    return read_bytes(path).decode("latin-1").strip() if is_file(path) else None


_FIELDS = {
    "submission_division": "logging.mlperf.division",
    "submission_org": "logging.mlperf.organization",
    "submission_platform": "logging.mlperf.platform",
    "submission_status": "logging.mlperf.status",
    "seed": "seed",
    "global_batch_size": "schedule.global_batch_size",
    "opt_name": "optim.name",
    "opt_adamw_beta_1": "optim.beta1",
    "opt_adamw_beta_2": "optim.beta2",
    "opt_adamw_epsilon": "optim.epsilon",
    "opt_adamw_weight_decay": "optim.weight_decay",
    "opt_base_learning_rate": "optim.learning_rate",
    "opt_gradient_clip_norm": "optim.max_grad_norm",
    "opt_learning_rate_warmup_steps": "schedule.warmup_steps",
    "target_accuracy": "evaluation.target_loss",
}
"""Keys of the log, each with the field of the configuration that decides it."""
ANY_VALUE = (("seed", RANDOM_SEED), ("submission_division", "auto"))
"""Keys whose value the run decides, with what the configuration has then."""
_OPEN = "Set logging.mlperf.division to open, or repeat the run with the benchmark's values."
_PAIR = "Give the log and the config.json of the same run."


@rule("9.1", _PAIR, needs="config.json")
def log_is_of_its_configuration(run: Run) -> Iterator[str]:
    """Seed, batch, rate, warm-up, optimizer and submitter are those of `config.json`."""
    for key, field in _FIELDS.items():
        if run.config is None or run.first(key) is None or not _has(run.config, field):
            continue
        logged, configured = run.value(key), value_at(run.config, field)
        if (key, configured) in ANY_VALUE:
            continue
        if logged != configured:
            yield f"{key} is {logged!r} in the log, {field} is {configured!r} in config.json"


@rule("9.1", "Give the config.json that the run wrote.")
def configuration_is_valid(run: Run) -> Iterator[str]:
    """`config.json` is a configuration; the finding names its path and its fields."""
    if run.config or run.config_file is not None:
        try:
            _ = run.resolved
        except ConfigError as error:
            yield str(error)


@rule("5.2", _PAIR, needs="config.json")
def precision_is_stated(run: Run) -> Iterator[str]:
    """The formats in the log are those of `config.json`."""
    if run.config is None:
        return
    names = {str(name): text for name, text in PRECISION_NAMES.items()}
    compute = names.get(str(value_at(run.config, "precision.compute")))
    fp8 = value_at(run.config, "precision.fp8") not in (None, "none")
    expected = {
        "lowest_numerical_precision_in_linear": "fp8" if fp8 else compute,
        "lowest_numerical_precision_in_attn": compute,
    }
    for key, allowed in expected.items():
        logged = run.value(key)
        if logged is not None and allowed is not None and logged != allowed:
            yield f"{key} is {logged!r} in the log, config.json computes in {allowed}"


@rule("9.1", _OPEN, closed_only=True, needs="config.json")
def benchmark_configuration(run: Run) -> Iterator[str]:
    """`config.json` has the values that the closed division prescribes."""
    if run.config is None:
        return
    preset = run.config.get("preset")
    if preset is not None and not str(preset).startswith(PREFIX):
        yield f"config.json is of the preset {preset}, which is not the benchmark"
    for field, allowed in FIXED_VALUES.items():
        given = _plain(value_at(run.config, field))
        if _has(run.config, field) and given != _plain(allowed):
            yield f"{field} is {given!r} in config.json; allowed: {allowed!r}"


@rule("6.1", "Train and evaluate on MLCommons' data sets.", closed_only=True, needs="config.json")
def benchmark_data(run: Run) -> Iterator[str]:
    """The data are not synthetic."""
    if run.config is not None and value_at(run.config, "data.source") == "synthetic":
        yield "data.source is synthetic in config.json"


@rule(
    "6.1", "Flush the page caches of every node, or restart them, before a run.", closed_only=True
)
def caches_are_flushed(run: Run) -> Iterator[str]:
    """Each `cache_clear` is true, and before `run_start`."""
    start = run.first("run_start")
    for line in run.all("cache_clear"):
        if line.value is not True and str(line.value).lower() != "true":
            yield f"{line.place} is {line.value!r}: data may have been in memory"
        elif start is not None and line.number > start.number:
            yield f"{line.place} is after run_start (line {start.number})"


@rule(
    "9.1", "Give the log and the system description of the same run.", needs="report of the nodes"
)
def batch_is_of_its_parts(run: Run) -> Iterator[str]:
    """Micro batch × accumulation × ranks is the global batch, but for padding of weight 0."""
    if not run.all("run_resumed"):
        yield from batch_faults(run, run.system)


def batch_faults(run: Run, system: Mapping[str, Any], whose: str = "") -> Iterator[str]:
    """Yield a text if the logged micro batches on the ranks of ``system`` do not make the global batch."""
    batch, micro = run.number("global_batch_size"), run.number("micro_batch_size")
    steps, ranks = run.number("gradient_accumulation_steps"), num_ranks(system)
    if batch is None or micro is None or steps is None or not ranks:
        return
    for axis in ("tensor", "pipeline", "context"):
        ranks //= max(1, run.number(f"{axis}_parallelism") or 1)
    product = micro * steps * ranks
    if not 0 <= product - batch < max(1, ranks * steps):
        yield (
            f"micro_batch_size {micro} x gradient_accumulation_steps {steps} x {ranks} ranks{whose} "
            f"is {product}, global_batch_size is {batch}"
        )


def _has(values: Mapping[str, Any], path: str) -> bool:
    parent, _, name = path.rpartition(".")
    found = value_at(values, parent) if parent else values
    return isinstance(found, Mapping) and name in found


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


_SUBMISSION_RULES = ""
_MAX_SHOWN = 3


@rule(
    _SUBMISSION_RULES,
    "Give the log and the chain that the run wrote; fluxtrain mlperf verify compares them.",
    needs="chain.jsonl",
)
def log_follows_its_chain(run: Run) -> Iterator[str]:
    """A log has the lines of its chain, and the chain the heads that the operator saw, if known."""
    path = chain_of(run)
    if path is None:
        return
    if not is_file(path):
        if run.first(CHAIN_KEY) is not None:
            yield f"the log has a chain, and there is no {path.name}"
        return
    heads = heads_of_job(run.log.parent) if path.name == CHAIN_FILE else None
    found = verify(read_bytes(run.log), read_bytes(path), heads).findings
    yield from found[:_MAX_SHOWN]


RULES: tuple[Rule[Run], ...] = rules_in(globals())
