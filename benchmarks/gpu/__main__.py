"""Measures the trainer on one GPU: ``python -m benchmarks.gpu [ceiling|step|ablate|profile]``, or all four.

Each part ends within ``--minutes``, needs no network, prints tables and writes PART.json. With ``--toy`` a
tiny model runs on any machine, which shows that the kit works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import ablate, ceiling, profile, step
from benchmarks.gpu.contenders import CONTENDERS
from benchmarks.gpu.setting import machine, make_setting

PARTS = ("ceiling", "step", "ablate", "profile")
_SPARE_SECONDS = 20.0  # of --minutes, for the end of the last process and the report


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return 0."""
    options = _parser().parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    facts = machine()
    print(f"{facts['device']}, torch {facts['torch']}, {facts['date']}; {facts['state']}")
    for part in [options.part] if options.part else PARTS:
        result = _measure(part, options)
        path = options.output / f"{part}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {path}", flush=True)
    return 0


def _measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    size = {name: getattr(options, name) for name in ("toy", "batch", "latent", "text")}
    setting, seconds = make_setting(**size), 60 * options.minutes - _SPARE_SECONDS
    if part == "ceiling":
        setting = setting.at(step.TOY_DEPTHS[0] if options.toy else step.DEPTHS[0])
        result = ceiling.measure(setting, options.toy)
        ceiling.report(result, setting)
    elif part == "step":
        result = step.measure(setting, size, options.contenders, seconds)
        step.report(result)
    elif part == "ablate":
        result = ablate.measure(size, setting.batch, seconds)
        ablate.report(result)
    else:
        result = profile.measure(size, options.output, seconds)
        profile.report(result)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, help="all by default")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--minutes", type=float, default=9, help="limit of each part")
    parser.add_argument("--batch", type=int, help="samples of a micro batch, 32 by default")
    parser.add_argument("--latent", type=int, help="side of the latents, pixels / 8")
    parser.add_argument("--text", type=int, help="text tokens")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
