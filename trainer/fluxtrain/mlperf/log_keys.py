"""The allowed values of each key of a ``flux1`` log, and the field of the job that sets it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KeyRule:
    """The values that the checker accepts for a key, how to fix others, and why the key may be missing."""

    allowed: str
    fix: str = "fluxtrain writes this line; check the original log"
    absent: str = "fluxtrain always writes it; check the original log"


def _field(name: str) -> str:
    return f"set spec.run.{name}"


_FORMATS = (
    "fp64, fp32, tf32, fp16, bfloat16, fp8, mxfp6 (6.1.0 only), nvfp4, mxfp4, int8, uint8, int4 "
    "or uint4"
)
_ONE_OR_MORE = "a whole number from 1; an axis that is not used is 1"
_SAMPLES = "samples_count in its metadata, after run_start"

_LOSS = "a number, with samples_count in its metadata"
_NOT_EVALUATED = "nothing was evaluated; set spec.run.evaluation.every_samples above 0"
_NOT_OVER = "the run is not over; the same command resumes it"

KEY_RULES: dict[str, KeyRule] = {
    "submission_benchmark": KeyRule("flux1"),
    "submission_org": KeyRule("any text but the empty one", _field("logging.mlperf.organization")),
    "submission_platform": KeyRule("any text but the empty one", _field("logging.mlperf.platform")),
    "submission_division": KeyRule("closed or open", _field("logging.mlperf.division")),
    "cache_clear": KeyRule("any value"),
    "init_start": KeyRule("to be before init_stop and run_start"),
    "run_start": KeyRule("to be after init_stop, once"),
    "run_stop": KeyRule("once, after run_start, with a status in its metadata", absent=_NOT_OVER),
    "block_start": KeyRule(_SAMPLES, absent="no step was taken"),
    "block_stop": KeyRule(_SAMPLES, absent=_NOT_OVER),
    "eval_start": KeyRule(_SAMPLES),
    "eval_stop": KeyRule(_SAMPLES),
    "train_samples": KeyRule("any value but the empty text"),
    "eval_samples": KeyRule("any value but the empty text"),
    "global_batch_size": KeyRule("a number from 0", _field("schedule.global_batch_size")),
    "gradient_accumulation_steps": KeyRule("a number above 0"),
    "opt_name": KeyRule("adamw, in lower case"),
    "opt_adamw_beta_1": KeyRule("exactly 0.9", _field("optim.beta1")),
    "opt_adamw_beta_2": KeyRule("exactly 0.95", _field("optim.beta2")),
    "opt_adamw_epsilon": KeyRule("exactly 1e-08", _field("optim.epsilon")),
    "opt_adamw_weight_decay": KeyRule("exactly 0.1", _field("optim.weight_decay")),
    "opt_gradient_clip_norm": KeyRule("exactly 1.0", _field("optim.max_grad_norm")),
    "opt_base_learning_rate": KeyRule("a number from 0", _field("optim.learning_rate")),
    "opt_learning_rate_warmup_steps": KeyRule("a number from 0", _field("schedule.warmup_steps")),
    "lowest_numerical_precision_in_linear": KeyRule(_FORMATS, _field("precision.compute")),
    "lowest_numerical_precision_in_attn": KeyRule(_FORMATS, _field("precision.compute")),
    "lowest_numerical_precision_in_comm": KeyRule(_FORMATS, _field("precision.reduce")),
    "tensor_parallelism": KeyRule(_ONE_OR_MORE),
    "pipeline_parallelism": KeyRule(_ONE_OR_MORE),
    "context_parallelism": KeyRule(_ONE_OR_MORE),
    "expert_parallelism": KeyRule(_ONE_OR_MORE),
    "micro_batch_size": KeyRule("a whole number from 1", _field("parallel.micro_batch_size")),
    "config_filename": KeyRule("any value but the empty text"),
    "eval_accuracy": KeyRule(_LOSS, absent=_NOT_EVALUATED),
    "averaged_validation_loss": KeyRule(_LOSS, absent=_NOT_EVALUATED),
}
"""The rules of rulesets 5.1.0 to 6.1.0; ``init_stop`` and ``evaluation_frequency`` depend on other lines."""
