"""What each key of a ``flux1`` log may hold, and the field of the job that decides it, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """The values that the checker accepts for one key, how to come by them, and why it may be missing."""

    allowed: str
    cure: str = "fluxtrain writes this line itself; check the log as it was written"
    absent: str = "fluxtrain always writes it; check the log as it was written"


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
_NOT_OVER = "the run is not over; the same command goes on with it"

RULES: dict[str, Rule] = {
    "submission_benchmark": Rule("flux1"),
    "submission_org": Rule("any text but the empty one", _field("logging.mlperf.organization")),
    "submission_platform": Rule("any text but the empty one", _field("logging.mlperf.platform")),
    "submission_division": Rule("closed or open", _field("logging.mlperf.division")),
    "cache_clear": Rule("any value"),
    "init_start": Rule("to stand before init_stop and run_start"),
    "run_start": Rule("to stand after init_stop, once"),
    "run_stop": Rule("once, after run_start, with a status in its metadata", absent=_NOT_OVER),
    "block_start": Rule(_SAMPLES, absent="no step was taken"),
    "block_stop": Rule(_SAMPLES, absent=_NOT_OVER),
    "eval_start": Rule(_SAMPLES),
    "eval_stop": Rule(_SAMPLES),
    "train_samples": Rule("any value but the empty text"),
    "eval_samples": Rule("any value but the empty text"),
    "global_batch_size": Rule("a number from 0", _field("schedule.global_batch_size")),
    "gradient_accumulation_steps": Rule("a number above 0"),
    "opt_name": Rule("adamw, in lower case"),
    "opt_adamw_beta_1": Rule("exactly 0.9", _field("optim.beta1")),
    "opt_adamw_beta_2": Rule("exactly 0.95", _field("optim.beta2")),
    "opt_adamw_epsilon": Rule("exactly 1e-08", _field("optim.epsilon")),
    "opt_adamw_weight_decay": Rule("exactly 0.1", _field("optim.weight_decay")),
    "opt_gradient_clip_norm": Rule("exactly 1.0", _field("optim.max_grad_norm")),
    "opt_base_learning_rate": Rule("a number from 0", _field("optim.learning_rate")),
    "opt_learning_rate_warmup_steps": Rule("a number from 0", _field("schedule.warmup_steps")),
    "lowest_numerical_precision_in_linear": Rule(_FORMATS, _field("precision.compute")),
    "lowest_numerical_precision_in_attn": Rule(_FORMATS, _field("precision.compute")),
    "lowest_numerical_precision_in_comm": Rule(_FORMATS, _field("precision.reduce")),
    "tensor_parallelism": Rule(_ONE_OR_MORE),
    "pipeline_parallelism": Rule(_ONE_OR_MORE),
    "context_parallelism": Rule(_ONE_OR_MORE),
    "expert_parallelism": Rule(_ONE_OR_MORE),
    "micro_batch_size": Rule("a whole number from 1", _field("parallel.micro_batch_size")),
    "config_filename": Rule("any value but the empty text"),
    "eval_accuracy": Rule(_LOSS, absent=_NOT_EVALUATED),
    "averaged_validation_loss": Rule(_LOSS, absent=_NOT_EVALUATED),
}
"""The rules of rulesets 5.1.0 to 6.1.0; ``init_stop`` and ``evaluation_frequency`` depend on other lines."""
