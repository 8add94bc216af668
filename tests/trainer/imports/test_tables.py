"""The tables: every option answers every kind of value, with fields or with a reason."""

from __future__ import annotations

import contextlib

import pytest

from fluxtrain.contract.model_base import iter_fields
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError
from fluxtrain.imports.ai_toolkit import AI_TOOLKIT
from fluxtrain.imports.kohya import KOHYA
from fluxtrain.imports.more.diffusers import DIFFUSERS
from fluxtrain.imports.more.onetrainer import ONETRAINER
from fluxtrain.imports.more.torchtitan import MLPERF, TORCHTITAN
from fluxtrain.imports.simpletuner import SIMPLETUNER
from fluxtrain.imports.table import Disposition, NoCounterpartError, Reading, Trainer
from fluxtrain.imports.variables import GUIDE

FIELDS = {field.path for field in iter_fields(RunConfig)}
VALUES: list[object] = [
    *("", "x", "1", "-1", "1e-3", "true", "wandb", "polynomial", "flux", "lora", "a,b", "1,2"),
    *("all", "all+ffs", "ai-toolkit", "sigma"),
    *(0, 1, -1, 7, 10**400, 0.5, -0.0, float("nan"), float("inf"), True, False),
    *([], [1], ["a"], [None], {}, {"a": 1}, b"bytes"),
]
TRAINERS = (KOHYA, AI_TOOLKIT, SIMPLETUNER, DIFFUSERS, ONETRAINER, TORCHTITAN)


@pytest.mark.parametrize("trainer", [*TRAINERS, GUIDE, MLPERF], ids=lambda it: it.name)
def test_every_value_of_every_option_gives_fields_or_a_reason(trainer: Trainer) -> None:
    answers = 0
    for name, row in trainer.options.items():
        for value in VALUES:
            if row.convert is None:
                break
            reading = Reading({name: value}, trainer.defaults, epoch_samples=100)
            with contextlib.suppress(ConfigError, NoCounterpartError):
                found = row.convert(reading, name)
                assert set(found) <= set(row.fields), (
                    f"{name}: the documentation lacks {set(found)}"
                )
                assert found or row.note or name in reading.notes, f"{name}={value!r}: no reason"
            answers += 1
    assert answers > 500


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda it: it.name)
def test_every_row_that_is_not_written_has_its_reason(trainer: Trainer) -> None:
    for name, row in trainer.options.items():
        assert set(row.fields) <= FIELDS, name
        assert (row.convert is None) == (row.disposition is not Disposition.WRITTEN), name
        assert row.note or row.fields, name
