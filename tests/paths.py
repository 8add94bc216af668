"""Folders and files of the project that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
MICRO = EXAMPLES / "micro.yaml"
