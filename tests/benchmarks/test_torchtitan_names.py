"""torchtitan's names of the tensors: one of ours each, and back."""

from __future__ import annotations

import torch
from benchmarks.training.torchtitan_names import from_torchtitan, to_torchtitan

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.layers import entries


def test_only_the_names_of_the_norms_differ() -> None:
    ours = {entry.name: torch.tensor(index) for index, entry in enumerate(entries(ModelConfig()))}
    theirs = to_torchtitan(ours)
    changed = set(ours) - set(theirs)
    assert changed == {name for name in ours if "norm" in name}
    assert {name.replace("scale", "weight") for name in changed} == set(theirs) - set(ours)
    assert from_torchtitan(theirs) == ours
