"""A training step of torchtitan's ``flux-debug``, compared with torchtitan and diffusers.

Every contender is a process with the same torch, weights, batch and threads; they run in turn, so that other
programs affect all equally.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from statistics import median

from benchmarks.peers import ROOT, peers_python
from benchmarks.table import print_table, spread

from fluxtrain.launch.torchrun import MALLOC_SETTINGS

NAMES = ("fluxtrain", "torchtitan", "torchtitan-as-shipped", "diffusers")
WARMUP_STEPS = 2
LOSS_TOLERANCE = 1e-4
TARGETS = {"eager": 1.1, "compiled": 1.4}
Results = list[tuple[float, float, float]]  # seconds, seconds of all cores, and loss of each step


class Contender:
    """A process that takes steps on request."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        """Drive ``process``, which runs ``benchmarks.training.contender``."""
        self.name, self._process = name, process
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[float] = []

    def take(self, steps: int, timed: bool = True) -> None:
        """Take ``steps``; record their losses and, if ``timed``, their seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(steps, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended early; --verbose shows its messages")
        results: Results = json.loads(line)
        self.losses += [loss for _, _, loss in results]
        if timed:
            self.seconds += [seconds for seconds, _, _ in results]
            self.cpu_seconds += [seconds for _, seconds, _ in results]


@contextmanager
def started(name: str, options: Namespace, compiled: bool) -> Iterator[Contender]:
    """Run contender ``name``."""
    python = sys.executable if name == "fluxtrain" else str(peers_python())
    command = [python, "-W", "ignore", "-m", "benchmarks.training.contender", name]
    for size in ("batch", "latent", "text"):
        command += [f"--{size}", str(getattr(options, size))]
    command += [f"--rank={options.rank}"] + (["--compiled"] if compiled else [])
    malloc = MALLOC_SETTINGS if name == "fluxtrain" else {}  # as set by our launcher, on CPUs
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **malloc, "OMP_NUM_THREADS": str(options.threads)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if options.verbose else subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Contender(name, process)
    finally:
        process.kill()
        process.communicate()  # unlike close(), it forgives a pipe that is broken already


def race(options: Namespace, compiled: bool) -> list[Contender]:
    """Run all contenders in turn; return them with their times."""
    with ExitStack() as stack:
        contenders = [
            stack.enter_context(started(name, options, compiled)) for name in options.contenders
        ]
        for contender in contenders:
            contender.take(WARMUP_STEPS, timed=False)
        for turn in range(options.rounds):
            first = turn % len(contenders)  # the order rotates
            for contender in contenders[first:] + contenders[:first]:
                contender.take(options.steps)
        return contenders


def check_losses(contenders: list[Contender]) -> float:
    """Return the greatest relative difference of any step's loss; exit if it exceeds the tolerance."""
    ours = contenders[0].losses
    worst = max(
        abs(loss - own) / own
        for contender in contenders
        for loss, own in zip(contender.losses, ours, strict=True)
    )
    if worst > LOSS_TOLERANCE:
        losses = {contender.name: contender.losses for contender in contenders}
        sys.exit(f"the losses differ by {worst:.1e}, more than {LOSS_TOLERANCE:.0e}: {losses}")
    return worst


def report(title: str, options: Namespace, contenders: list[Contender]) -> None:
    """Print the table of one comparison."""
    tokens = f"{(options.latent // 2) ** 2} + {options.text} tokens"
    own, own_cpu = median(contenders[0].seconds), median(contenders[0].cpu_seconds)
    rows = [
        [
            contender.name,
            spread(contender.seconds, 1000),
            f"{options.batch / median(contender.seconds):.2f}",
            f"{median(contender.seconds) / own:.2f}",
            spread(contender.cpu_seconds, 1000),
            f"{median(contender.cpu_seconds) / own_cpu:.2f}",
            f"{contender.losses[0]:.6f}",
            f"{contender.losses[-1]:.6f}",
        ]
        for contender in contenders
    ]
    print_table(
        f"{title}, float32, batch {options.batch}, {tokens}, {options.threads} threads",
        ["", "ms per step", "samples/s", "x ours", "CPU ms", "x ours", "first loss", "last loss"],
        rows,
    )
    print(
        f"  losses of all {len(contenders[0].losses)} steps agree to {check_losses(contenders):.1e}"
    )


def parser(
    program: str, description: str | None, names: tuple[str, ...]
) -> argparse.ArgumentParser:
    """Return the parser of the options of a comparison of the contenders ``names``."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--latent", type=int, default=16, help="side of the latents: pixels / 8")
    parser.add_argument("--text", type=int, default=64, help="text tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kinds", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--contenders", nargs="+", choices=names, default=list(names))
    parser.add_argument("--verbose", action="store_true", help="show what the contenders print")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Compare eager, then compiled."""
    options = parser("benchmarks.training.step", __doc__, NAMES).parse_args(
        arguments, Namespace(rank=0)
    )
    for kind in options.kinds:
        title = f"training step, {kind} (target: torchtitan >= {TARGETS[kind]} x ours)"
        report(title, options, race(options, kind == "compiled"))


if __name__ == "__main__":
    main()
