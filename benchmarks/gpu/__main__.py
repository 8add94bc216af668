"""Measures the trainer on one GPU: ``python -m benchmarks.gpu [PART]``, or all parts in turn.

``first`` shows in a minute whether all works and which figures to expect. Each part ends within
``--minutes``, needs no network, prints tables and writes PART.json; errors.log has what its processes wrote
to stderr. With ``--toy`` a tiny model runs on any machine, which shows that the kit works and nothing else.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.gpu import ablate, ceiling, first, profile, step
from benchmarks.gpu.contenders import CONTENDERS, without_fsdp
from benchmarks.gpu.processes import Task
from benchmarks.gpu.setting import (
    TOY_DEPTH,
    Depth,
    Setting,
    deepest,
    gpu_memory,
    halves,
    machine,
    make_setting,
)

PARTS = ("first", "ceiling", "step", "ablate", "profile")
_SPARE_SECONDS = 20.0  # of --minutes, for the end of the last process and the report
_FIRST_MINUTES, _MINUTES = 1.0, 9.0


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return 0, or 1 if a check of the first failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    setting = make_setting(**_size(options))
    _leave_out(parser, options, setting)
    options.output.mkdir(parents=True, exist_ok=True)
    facts = machine()
    print(f"{facts['device']}, torch {facts['torch']}, {facts['date']}; {facts['state']}")
    code = 0
    for part in [options.part] if options.part else PARTS:
        seconds = seconds_of_part(part, options)
        faulthandler.dump_traceback_later(seconds, exit=True)  # a kernel may hang
        result = _measure(part, options, setting, monotonic() + seconds)
        if part == "first" and first.problems(result):
            code = 1
        path = options.output / f"{part}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {path}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return code


def seconds_of_part(part: str, options: argparse.Namespace) -> float:
    """Return the seconds after which ``part`` is ended if it does not end by itself."""
    minutes: float = options.minutes or (_FIRST_MINUTES if part == "first" else _MINUTES)
    return 60 * minutes


def _leave_out(
    parser: argparse.ArgumentParser, options: argparse.Namespace, setting: Setting
) -> None:
    """Leave out of the options what one GPU cannot show; say so in a line."""
    options.switches = list(ablate.TOY_SWITCHES if options.toy else ablate.SWITCHES)
    for part, chosen, known in (
        ("step", options.contenders, CONTENDERS),
        ("ablate", options.switches, ablate.SWITCHES),
    ):
        needs = {name: known[name].needs_fsdp for name in chosen}
        if (left_out := without_fsdp(needs, setting)) and options.part in (None, part):
            print(f"left out, as FSDP2 does not divide a model on one GPU: {', '.join(left_out)}")
            chosen[:] = [name for name in chosen if name not in left_out]
    if not options.contenders:
        parser.error(
            "--contenders: all of them need FSDP2, which does nothing on one GPU; name fluxtrain too"
        )


def _measure(
    part: str, options: argparse.Namespace, setting: Setting, end: float
) -> dict[str, Any]:
    task = Task(_size(options), _depths(part, options, setting), end - _spare(part), options.output)
    if part == "first":
        result = first.measure(task, setting)
        first.report(result)
    elif part == "ceiling":
        setting = setting.at(task.depths[0])
        result = ceiling.measure(setting, options.toy)
        ceiling.report(result, setting)
    elif part == "step":
        result = step.measure(task, setting, options.contenders)
        step.report(result)
    elif part == "ablate":
        result = ablate.measure(task, setting.batch, options.switches)
        ablate.report(result)
    else:
        result = profile.measure(task)
        profile.report(result)
    return result


def _size(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("toy", "batch", "latent", "text")}


def _spare(part: str) -> float:
    return 5.0 if part == "first" else _SPARE_SECONDS


def _depths(part: str, options: argparse.Namespace, setting: Setting) -> tuple[Depth, ...]:
    """Return the given depths, or those that fit into the GPU, for ``ablate`` at twice the batch."""
    if options.depths:
        return tuple(options.depths)
    if options.toy:
        return halves(TOY_DEPTH)
    largest = replace(setting, batch=2 * setting.batch) if part == "ablate" else setting
    return halves(deepest(largest, gpu_memory()))


def _depth(text: str) -> Depth:
    double, plus, single = text.partition("+")
    if not (plus and double.isdecimal() and single.isdecimal() and int(double) + int(single) > 0):
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed is the number of double-stream and of single-stream blocks: 8+16"
        )
    return int(double), int(single)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0.5 <= minutes <= 600:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed are 0.5 to 600")
    return minutes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, help="all by default")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    text = (
        f"limit of each part; {_FIRST_MINUTES:g} for first, {_MINUTES:g} for the others by default"
    )
    parser.add_argument("--minutes", type=_minutes, help=text)
    parser.add_argument("--batch", type=int, help="samples of a micro batch, 32 by default")
    parser.add_argument("--latent", type=int, help="side of the latents, pixels / 8")
    parser.add_argument("--text", type=int, help="text tokens")
    text = "blocks of both kinds, such as 8+16 4+16 8+8; by default as many as the GPU has room for"
    parser.add_argument("--depths", nargs="+", type=_depth, help=text)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
