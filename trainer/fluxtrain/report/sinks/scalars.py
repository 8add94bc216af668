"""The numbers of a record of metrics.jsonl under the names that dashboards group by."""

from __future__ import annotations

from fluxtrain.report.records import Record

_GROUPS = {
    "loss": ("train_loss", "eval_loss"),
    "optimizer": ("grad_norm", "learning_rate"),
    "speed": ("samples_per_second", "tflops_per_gpu", "mfu", "data_wait_seconds", "seconds"),
    "memory": ("memory_allocated_bytes", "memory_reserved_bytes"),
}
BY_TIMESTEP = "eval_loss_by_timestep"
IMAGES = "sample_images"
"""The name of the sample images."""


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of ``record`` by group and name, such as loss/train_loss; unknown ones are left out.

    The evaluation loss at t = 3/8 is eval_loss_by_timestep/3_of_8.
    """
    found: dict[str, float] = {
        f"{group}/{name}": record[name]
        for group, names in _GROUPS.items()
        for name in names
        if record.get(name) is not None
    }
    if "train_loss" in record:
        found["progress/step"] = record["step"]
    losses = record.get(BY_TIMESTEP, [])
    found |= {
        f"{BY_TIMESTEP}/{index}_of_{len(losses)}": loss
        for index, loss in enumerate(losses)
        if loss is not None
    }
    return found
