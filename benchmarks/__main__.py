"""Runs all benchmarks in sequence (``make bench``); one alone with ``-m benchmarks.training.step``."""

from __future__ import annotations

import platform
import subprocess
import sys

import torch
from benchmarks.peers import ROOT, peers_python

PARTS = (
    "training.parity",
    "training.step",
    "training.lora",
    "data.loader",
    "data.layouts",
    "training.checkpoint",
    "data.resume",
    "data.evaluation_start",
    "data.clean",
    "data.preprocess",
)


def main() -> int:
    """Run every part in its own process with the arguments of the command line."""
    peers_python()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}", flush=True)
    command = [sys.executable, "-W", "ignore", "-m"]
    codes = [
        subprocess.run([*command, f"benchmarks.{part}", *sys.argv[1:]], cwd=ROOT).returncode
        for part in PARTS
    ]
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
