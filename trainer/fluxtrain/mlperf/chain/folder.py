"""Whether the configuration and the checkpoints in the folder of a run are those of its chain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxtrain import run_state
from fluxtrain.checksums import blocks_of
from fluxtrain.contract.launch import CHECKPOINTS_FOLDER
from fluxtrain.contract.run.config import RANDOM_SEED
from fluxtrain.errors import DataError
from fluxtrain.mlperf.chain.record import CHECKPOINT, END, RESUME, Record, digest
from fluxtrain.mlperf.chain.verdict import Verdict

_DRAWN = ("seed", RANDOM_SEED)
"""A field with this value in the file has the drawn one in the chain."""


def check_config(
    config: Mapping[str, Any], name: str, records: Sequence[Record], verdict: Verdict
) -> None:
    """Name the first field of the file ``name`` that is not that of the last start of the ranks."""
    told = next((r.values["config"] for r in reversed(records) if "config" in r.values), None)
    if not isinstance(told, Mapping):
        verdict.find("the chain has no configuration")
        return
    given, run = dict(_flat(config)), dict(_flat(told))
    for field in sorted({*given, *run}):
        one, other = given.get(field), run.get(field)
        by_epochs = field == "schedule.steps" and run.get("schedule.epochs") is not None
        if one != other and (field, one) != _DRAWN and not by_epochs:
            verdict.find(f"{name}: {field} is {one!r:.60}, the run had {other!r:.60}")
            return


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def manifest_digest(checkpoint: Path) -> str:
    """Return the hash of the file DONE of a checkpoint, which has the checksums of all its files."""
    return digest((checkpoint / run_state.DONE).read_bytes())


def check_checkpoints(
    output: Path, records: Sequence[Record], deep: bool, verdict: Verdict
) -> None:
    """Name the first checkpoint that is not the one that was saved; ``deep`` also reads all its blocks.

    Blocks have CRC-32 checksums: they find damage, and not who adapts a block to its checksum.
    """
    saved = {
        (r.values.get("step"), r.values.get("manifest")) for r in records if r.kind == CHECKPOINT
    }
    steps = [step for step, _ in saved if isinstance(step, int)]
    for record in records:
        loaded = record.values.get("loaded")
        if record.kind == RESUME and isinstance(loaded, Mapping) and loaded.get("manifest"):
            step, manifest = loaded.get("step"), loaded.get("manifest")
            if step in steps and (step, manifest) not in saved:
                verdict.find(
                    f"record {record.number}: not the saved checkpoint of step {step} was resumed from"
                )
    folder = output / CHECKPOINTS_FOLDER
    present = run_state.complete(folder)
    if steps and run_state.folder_of(folder, max(steps)) not in present:
        verdict.find(f"the checkpoint of step {max(steps)}, the newest one, is not in {folder}")
    for checkpoint in present:
        step = run_state.step_of(checkpoint)
        if step not in steps:
            _unknown(checkpoint, step > max(steps, default=0), records, verdict)
        elif (step, manifest_digest(checkpoint)) not in saved:
            verdict.find(
                f"{checkpoint.name} is not the checkpoint that was saved: its DONE differs"
            )
        elif deep and (damage := _damage(checkpoint)):
            verdict.find(f"{checkpoint.name} is not the checkpoint that was saved: {damage}")


def _unknown(checkpoint: Path, is_newer: bool, records: Sequence[Record], verdict: Verdict) -> None:
    this = {"step": run_state.step_of(checkpoint), "manifest": manifest_digest(checkpoint)}
    if any(record.values.get("loaded") == this for record in records):
        return  # saved when the process was killed, and resumed from
    if is_newer and records[-1].kind != END:
        verdict.note(
            f"{checkpoint.name} has no record: the process was killed when it was complete"
        )
    else:
        verdict.find(f"{checkpoint.name} has no record: it was put there")


def _damage(checkpoint: Path) -> str:
    try:
        blocks = blocks_of(run_state.read_checksums(checkpoint))
        for block in blocks:
            if not block.is_whole_in(checkpoint):
                return f"{block.file} differs at byte {block.offset}"
    except (OSError, DataError) as error:
        return str(error)
    return ""
