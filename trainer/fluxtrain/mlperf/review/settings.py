"""Rules on a run's settings: what the log says against the configuration, the system and the benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fluxtrain.contract.run.closed_division import FIXED_VALUES, PREFIX
from fluxtrain.contract.run.config import RANDOM_SEED
from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.evidence import Run, num_ranks
from fluxtrain.mlperf.facts import PRECISION_NAMES
from fluxtrain.mlperf.review.rule import Rule, rule

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


@rule("log-is-of-its-configuration", "9.1", _PAIR)
def log_is_of_its_configuration(run: Run) -> Iterator[str]:
    """Values in the log are those of config.json."""
    for key, field in _FIELDS.items():
        if run.config is None or run.first(key) is None or not _has(run.config, field):
            continue
        logged, configured = run.value(key), _get(run.config, field)
        if (key, configured) in ANY_VALUE:
            continue
        if logged != configured:
            yield f"{key} is {logged!r} in the log, {field} is {configured!r} in config.json"


@rule("configuration-is-valid", "9.1", "Give the config.json that the run wrote.")
def configuration_is_valid(run: Run) -> Iterator[str]:
    """config.json is a configuration."""
    if run.config or run.config_file is not None:
        try:
            _ = run.resolved
        except ConfigError as error:
            yield str(error)


@rule("precision-is-stated", "5.2", _PAIR)
def precision_is_stated(run: Run) -> Iterator[str]:
    """The formats in the log are those of config.json."""
    if run.config is None:
        return
    names = {str(name): text for name, text in PRECISION_NAMES.items()}
    compute = names.get(str(_get(run.config, "precision.compute")))
    fp8 = _get(run.config, "precision.fp8") not in (None, "none")
    expected = {
        "lowest_numerical_precision_in_linear": "fp8" if fp8 else compute,
        "lowest_numerical_precision_in_attn": compute,
    }
    for key, allowed in expected.items():
        logged = run.value(key)
        if logged is not None and allowed is not None and logged != allowed:
            yield f"{key} is {logged!r} in the log, config.json computes in {allowed}"


@rule("benchmark-configuration", "9.1", _OPEN, closed_only=True)
def benchmark_configuration(run: Run) -> Iterator[str]:
    """The configuration has the values that the closed division prescribes."""
    if run.config is None:
        return
    preset = run.config.get("preset")
    if preset is not None and not str(preset).startswith(PREFIX):
        yield f"config.json is of the preset {preset}, which is not the benchmark"
    for field, allowed in FIXED_VALUES.items():
        given = _plain(_get(run.config, field))
        if _has(run.config, field) and given != _plain(allowed):
            yield f"{field} is {given!r} in config.json; allowed: {allowed!r}"


@rule("benchmark-data", "6.1", "Train and evaluate on MLCommons' data sets.", closed_only=True)
def benchmark_data(run: Run) -> Iterator[str]:
    """The data are not synthetic."""
    if run.config is not None and _get(run.config, "data.source") == "synthetic":
        yield "data.source is synthetic in config.json"


@rule(
    "caches-are-flushed",
    "6.1",
    "Flush the page caches of every node, or restart them, before a run.",
    closed_only=True,
)
def caches_are_flushed(run: Run) -> Iterator[str]:
    """Every cache_clear is true, and before the run."""
    start = run.first("run_start")
    for line in run.all("cache_clear"):
        if line.value is not True and str(line.value).lower() != "true":
            yield f"{line.place} is {line.value!r}: data may have been in memory"
        elif start is not None and line.number > start.number:
            yield f"{line.place} is after run_start (line {start.number})"


@rule("batch-is-of-its-parts", "9.1", "Give the log and the system description of the same run.")
def batch_is_of_its_parts(run: Run) -> Iterator[str]:
    """Micro batch x accumulation x ranks is the global batch, but for weight-0 samples that fill it up."""
    if not run.all("run_resumed"):
        yield from batch_faults(run, run.system)


RULES: tuple[Rule[Run], ...] = (
    log_is_of_its_configuration,
    configuration_is_valid,
    precision_is_stated,
    benchmark_configuration,
    benchmark_data,
    caches_are_flushed,
    batch_is_of_its_parts,
)


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


def _get(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _has(values: Mapping[str, Any], path: str) -> bool:
    parent, _, name = path.rpartition(".")
    found = _get(values, parent) if parent else values
    return isinstance(found, Mapping) and name in found


def _plain(value: object) -> object:
    """Return ``value`` as JSON has it."""
    return list(value) if isinstance(value, tuple) else value
