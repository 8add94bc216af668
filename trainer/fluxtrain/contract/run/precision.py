"""PrecisionConfig: the data types of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from fluxtrain.contract.run.encoders import Precision
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.strict_model import Rule, StrictModel

Fp8 = Literal["none", "tensorwise", "rowwise"]
FP8_MULTIPLE = 16
"""Matrix products in fp8 need dimensions that are multiples of it."""
_BYTES: Mapping[Precision, int] = {"bfloat16": 2, "float32": 4}


class PrecisionConfig(StrictModel):
    """Data types. The state of optimizers is float32, but for moments in 8 bits."""

    rules: ClassVar = (
        Rule(
            "weights",
            "must be float32 unless compute is bfloat16",
            lambda precision: precision.weights == "float32" or precision.compute == "bfloat16",
            "self.weights == 'float32' || self.compute == 'bfloat16'",
            others=("compute",),
        ),
    )

    weights: Precision = "float32"
    """Data type of the trained weights, between steps and in checkpoints; adapters are float32. ``bfloat16``:
    there is no float32 copy of them, and their gradients are bfloat16 too, summed over micro batches in it,
    with an error that ``fluxtrain plan`` prints: 4 bytes of each parameter instead of 8, or of 10 on a single
    rank. Steps are computed in float32 and round the weights stochastically, so that changes below bfloat16's
    digits are taken on average."""
    compute: Precision = "bfloat16"
    """Data type of forward and backward; ``float32`` for exact comparisons and CPUs."""
    reduce: Precision = "float32"
    """Data type of the gradient reduction between ranks. ``bfloat16`` halves what they send, and rounds each
    micro batch's gradients when they are summed over the ranks; the sum over micro batches has the data type
    of the weights."""
    fp8: Fp8 = "none"
    """Compute the blocks' linear layers in fp8, but for the modulations. ``tensorwise``: one scale for each
    tensor, gradients in e5m2; ``rowwise``: one for each row or column, all in e4m3, slower. Scales follow the
    largest values (dynamic scaling). A GPU without fp8 is refused; a CPU emulates it."""

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of a trained weight."""
        return _BYTES[self.weights]


def _has_fp8_widths(model: ModelConfig) -> bool:
    widths = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    return all(width % FP8_MULTIPLE == 0 for width in widths)


FP8_WIDTHS = Rule(
    "model.hidden_size",
    f"must be a multiple of {FP8_MULTIPLE}, and so must be the MLP's width, if precision.fp8 is on",
    lambda run: run.precision.fp8 == "none" or _has_fp8_widths(run.model),
    f"self.precision.fp8 == 'none' || self.model.hidden_size % {FP8_MULTIPLE} == 0 && "
    f"int(double(self.model.hidden_size) * self.model.mlp_ratio) % {FP8_MULTIPLE} == 0",
    others=("precision.fp8", "model.mlp_ratio"),
)
"""A rule of RunConfig."""

WITHOUT_ADAPTERS = Rule(
    "precision.weights",
    "must be float32 if adapter is set: adapters always are",
    lambda run: run.precision.weights == "float32" or run.adapter is None,
    "self.precision.weights == 'float32' || !has(self.adapter)",
)
WITHOUT_AVERAGED_STEPS = Rule(
    "precision.weights",
    "must be float32 if optim.name is schedule_free_adamw: steps of its average are too small for bfloat16",
    lambda run: run.precision.weights == "float32" or run.optim.name != "schedule_free_adamw",
    "self.precision.weights == 'float32' || self.optim.name != 'schedule_free_adamw'",
    others=("optim.name",),
)
"""Rules of RunConfig."""
