"""The numerical difference of one training step to torchtitan's and diffusers'.

The model is torchtitan's ``flux-debug``. Every contender is a process with the same weights, latents, noise
and timesteps, in float32. Compared are the gradients, and the weights after AdamW, of each tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from benchmarks.peers import ROOT, peers_python
from benchmarks.table import print_table
from benchmarks.training.contender import CONTENDERS, FLUX_DEBUG, make_task
from benchmarks.training.torchtitan_names import from_torchtitan
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fluxtrain.model.layers import entries

PEERS = ("torchtitan", "diffusers")
TOLERANCE = 1e-5  # float32 sums of some thousand terms in another order, twice through four blocks
Tensors = Mapping[str, Tensor]


def from_diffusers(theirs: Tensors) -> dict[str, Tensor]:
    """Return diffusers' tensors under BFL's names: rows concatenated, final halves swapped."""
    tensors = {}
    for entry in entries(FLUX_DEBUG):
        rows = torch.cat([theirs[part] for part, _ in entry.parts])
        tensors[entry.name] = torch.cat(rows.chunk(2)[::-1]) if entry.swapped else rows
    return tensors


NAMES: dict[str, Callable[[Tensors], dict[str, Tensor]]] = {
    "fluxtrain": dict,
    "torchtitan": from_torchtitan,
    "diffusers": from_diffusers,
}


def take_step(name: str, output: Path) -> None:
    """Take one step of contender ``name``; write its gradients and new weights to ``output``."""
    step, model = CONTENDERS[name](make_task(2, 16, 64, compiled=False))
    gradients: dict[str, Tensor] = {}
    for key, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(  # before they are clipped
            lambda p, key=key: gradients.update({key: p.grad.clone()})
        )
    loss = step()
    rename = NAMES[name]
    weights = rename({key: p.detach() for key, p in model.named_parameters()})
    tensors = {f"gradient.{key}": tensor for key, tensor in rename(gradients).items()}
    tensors |= {f"weight.{key}": tensor for key, tensor in weights.items()}
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, output, metadata={"loss": json.dumps(loss.item())})


def group(name: str) -> str:
    """Return the row of the table for a tensor."""
    kind, first, *rest = name.split(".")
    if first in ("double_blocks", "single_blocks"):
        return f"{kind} of {first}: {rest[1]}"
    return f"{kind} of {first}"


def compare(ours: Path, theirs: Path) -> tuple[dict[str, float], float]:
    """Return the largest difference of each group, relative to the tensor's maximum, and that of the loss."""
    worst: dict[str, float] = {}
    with safe_open(ours, "pt") as own, safe_open(theirs, "pt") as other:
        assert set(own.keys()) == set(other.keys())
        for name in own.keys():  # noqa: SIM118  (not a mapping)
            expected, actual = other.get_tensor(name), own.get_tensor(name)
            error = ((actual - expected).abs().max() / expected.abs().max()).item()
            worst[group(name)] = max(worst.get(group(name), 0.0), error)
        losses = [json.loads(file.metadata()["loss"]) for file in (own, other)]
    return worst, abs(losses[0] - losses[1]) / losses[1]


def main(arguments: list[str] | None = None) -> int:
    """Take all steps and print the table; return 1 if a group differs by more than the tolerance."""
    parser = argparse.ArgumentParser(prog="benchmarks.training.parity", description=__doc__)
    parser.add_argument("--contender", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args(arguments)
    if options.contender:
        take_step(options.contender, options.output)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.safetensors" for name in NAMES}
        for name, path in files.items():
            python = sys.executable if name == "fluxtrain" else str(peers_python())
            command = [python, "-W", "ignore", "-m", "benchmarks.training.parity"]
            command += ["--contender", name, "--output", str(path)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=sys.stderr)
        differences = {peer: compare(files["fluxtrain"], files[peer]) for peer in PEERS}
    rows = [["loss", *(f"{loss:.1e}" for _, loss in differences.values())]]
    for name in sorted(differences[PEERS[0]][0]):
        rows.append([name, *(f"{groups[name]:.1e}" for groups, _ in differences.values())])
    print_table("one step, largest relative difference to", ["", *PEERS], rows)
    worst = max(error for groups, _ in differences.values() for error in groups.values())
    print(f"  largest of all: {worst:.1e} (tolerance {TOLERANCE:.0e})")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
