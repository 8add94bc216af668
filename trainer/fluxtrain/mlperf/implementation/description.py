"""``SYSTEM_fluxtrain.json`` of a package: this implementation on this system, as data."""

from __future__ import annotations

from typing import Any

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.mlperf.evidence import BENCHMARK, Run
from fluxtrain.mlperf.facts import DATA_KEY
from fluxtrain.mlperf.implementation.software import Software

_LOGGED = (
    *("submission_org", "submission_division", "global_batch_size", "micro_batch_size"),
    *("gradient_accumulation_steps", "train_samples", "eval_samples"),
    *("lowest_numerical_precision_in_linear", "lowest_numerical_precision_in_attn"),
    "lowest_numerical_precision_in_comm",
)
"""Keys of the log that the file repeats."""


def implementation_json(
    run: Run, config: RunConfig, software: Software, image: str | None, name: str
) -> dict[str, Any]:
    """Return the description of ``name``, of a ``run`` and the software of all runs."""
    return {
        "implementation": name,
        "benchmark": BENCHMARK,
        **{key: run.value(key) for key in _LOGGED},
        "starting_weights": config.initial_weights or "random, from the seed of each run",
        "weight_data_type": f"{config.precision.weights}, computed in {config.precision.compute}",
        "input_data_type": config.encoders.precision,
        "data": {
            "source": config.data.source,
            "train": config.data.train,
            "validation": config.data.validation,
            "order": config.data.order,
            "index_sha256": run.value(DATA_KEY),
        },
        "source": {
            "version": software.fluxtrain,
            "commit": software.revision or None,
            "sha256": software.source_sha256,
        },
        "python": software.python,
        "image": image,
        "in_container": software.in_container,
    }
