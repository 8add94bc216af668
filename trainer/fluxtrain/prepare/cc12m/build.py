"""CC12M for MLPerf: raw ``cc12m-wds`` tars in, cleaned tars out, as the reference cleans them.

Unreadable samples and those with a side below 256 pixels are dropped; the first 1,099,776 of the others, in
the order of the raw set, are the data set. Tars are cleaned in parallel and independently, and survive
SIGKILL; the first samples are selected at the end, so the result does not depend on the number of workers.

    OUTPUT/cc12m-train-0000.tar …   as data/tar reads them, with their indices
    OUTPUT/dropped.jsonl            every dropped sample and the reason
    OUTPUT/problematic_indices.txt  the indices of unreadable samples, found anew, as the reference lists them
    OUTPUT/report.json              counts, by reason and by tar
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from fluxtrain.errors import ConfigError, DataError
from fluxtrain.files import atomic_write
from fluxtrain.prepare.cc12m.clean_tar import (
    NOT_UTF8,
    CleanedTar,
    clean_tar,
    keep_only,
    read_cleaned_tar,
    remove,
)
from fluxtrain.prepare.cc12m.image import UNREADABLE
from fluxtrain.prepare.cc12m.source import Source
from fluxtrain.prepare.image import SETTINGS
from fluxtrain.prepare.progress import Advance, OnProgress, progress_bar
from fluxtrain.prepare.staging_dir import StagingDir, finished_report, open_staging_dir
from fluxtrain.prepare.worker_pool import available_cores, map_in_order

NUM_SAMPLES = 1_099_776
LISTED = "listed as problematic"
_PROBLEMATIC = (UNREADABLE, NOT_UTF8)
"""Reasons for which reading a sample fails in the reference."""
FOUND = "problematic_indices.txt"
_MAX_LIST_BYTES = 1 << 26


@dataclass(frozen=True)
class TarSelection:
    """The samples of one tar that are in the data set: kept ones before ``end`` that are not ``listed``.

    ``first`` is the index in the raw set of its first sample; ``end`` and ``listed`` are positions in the
    tar.
    """

    tar: str
    first: int
    end: int
    listed: frozenset[int]
    num_kept: int

    def includes(self, position: int) -> bool:
        """Return whether the kept sample at ``position`` is in the data set."""
        return position < self.end and position not in self.listed


def prepare_cc12m(
    source: Source,
    output: Path,
    num_samples: int | None = NUM_SAMPLES,
    problematic: frozenset[int] = frozenset(),
    num_workers: int | None = None,
    force: bool = False,
    stream: TextIO = sys.stderr,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Make ``output`` from the tars in ``source``, resuming an unfinished one; return the report.

    ``num_samples`` None takes all; samples at the indices ``problematic`` are always dropped.
    ``on_progress`` gets samples, or tars if all samples are taken. Raises DataError if a tar is incomplete
    or there are too few usable samples, StorageError if the output cannot be written.
    """
    settings = {**SETTINGS, "samples": num_samples, "problematic": _digest(problematic)}
    report = None if force else finished_report(output, settings)
    if report is None:
        names = source.names()
        with open_staging_dir(output, SETTINGS, force) as staging:
            clean = partial(clean_tar, source=source, staging=staging)
            total = num_samples or len(names)
            with (
                progress_bar("clean", total, stream, on_progress) as advance,
                closing(map_in_order(clean, names, num_workers or available_cores())) as tars,
            ):
                selections = list(_select(tars, num_samples, problematic, advance))
            _require_enough(staging, selections, num_samples)
            report = {"settings": settings, **_assemble(staging, selections, problematic)}
            staging.finish(report)
    print(f"{output}: {summarize(report)}", file=stream, flush=True)
    return report


def read_problematic(path: Path) -> frozenset[int]:
    """Return the indices in ``path``, one per line as in the reference's list; ConfigError if malformed."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_LIST_BYTES).decode("ascii").split()
        return frozenset(map(_parse_index, lines))
    except OSError as error:
        raise ConfigError("--problematic", str(path), str(error.strerror)) from None
    except ValueError as error:
        raise ConfigError("--problematic", str(path), f"not one index a line: {error}") from None


def summarize(report: dict[str, Any]) -> str:
    """Return the report in one sentence."""
    reasons = [f"{count:,} {reason}" for reason, count in report["dropped"].items()]
    compared = ""
    if "listed_but_readable" in report:
        unlisted, readable = report["unreadable_but_not_listed"], report["listed_but_readable"]
        compared = (
            f"; against the list: {unlisted:,} more are unreadable here, {readable:,} are readable"
        )
    dropped = ", ".join(reasons) or "none"
    return f"{report['kept']:,} of {report['read']:,} samples kept; dropped: {dropped}{compared}"


def _select(
    tars: Iterator[CleanedTar],
    num_samples: int | None,
    problematic: frozenset[int],
    advance: Advance,
) -> Iterator[TarSelection]:
    """Yield a selection for each tar until there are ``num_samples``; no further tar is cleaned."""
    first = num_kept = 0
    for tar in tars:
        missing = None if num_samples is None else num_samples - num_kept
        selection = _select_from(tar, first, problematic, missing)
        first, num_kept = first + tar.num_samples, num_kept + selection.num_kept
        advance(1 if num_samples is None else selection.num_kept)
        yield selection
        if num_kept == num_samples:
            return


def _select_from(
    tar: CleanedTar, first: int, problematic: frozenset[int], missing: int | None
) -> TarSelection:
    """Return the selection of at most ``missing`` samples from ``tar``, which begins at index ``first``."""
    after = first + tar.num_samples
    listed = frozenset(index - first for index in problematic if first <= index < after)
    kept = [position for position in tar.kept if position not in listed]
    if missing is None or len(kept) < missing:
        return TarSelection(tar.tar, first, tar.num_samples, listed, len(kept))
    return TarSelection(tar.tar, first, kept[missing - 1] + 1, listed, missing)


def _require_enough(
    staging: StagingDir, selections: list[TarSelection], num_samples: int | None
) -> None:
    num_kept = sum(selection.num_kept for selection in selections)
    if num_samples is not None and num_kept < num_samples:
        num_read = selections[-1].first + selections[-1].end
        raise DataError(
            f"only {num_kept:,} of {num_read:,} samples are usable, {num_samples:,} are needed: tars are "
            "missing, or use --samples all; the cleaned tars are kept"
        )
    if not num_kept:
        rows = [_require_cleaned(staging, selection.tar).dropped for selection in selections]
        reasons = Counter(row.reason for of_tar in rows for row in of_tar)
        told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
        raise DataError(f"none of the samples is usable: {told or 'the tars are empty'}")


def _assemble(
    staging: StagingDir, selections: list[TarSelection], problematic: frozenset[int]
) -> dict[str, Any]:
    """Reduce the tars in ``staging`` to ``selections``, write dropped.jsonl, and return the report."""
    selected = {selection.tar for selection in selections}
    for path in sorted(staging.path.glob("*.tar")):
        if path.name not in selected:
            remove(path.name, staging)
    reasons = Counter[str]()
    with atomic_write(staging.path / "dropped.jsonl") as partial, partial.open("w") as file:
        for selection in selections:
            rows = list(_dropped_rows(selection, _require_cleaned(staging, selection.tar)))
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
            reasons.update(row["reason"] for row in rows)
    found = _found_indices(staging, selections)
    with atomic_write(staging.path / FOUND) as partial:
        partial.write_text("".join(f"{index}\n" for index in sorted(found)))
    for selection in selections:
        cleaned = _require_cleaned(staging, selection.tar)
        keep_only(selection.tar, staging, cleaned, selection.includes)
    report: dict[str, Any] = {
        "kept": sum(selection.num_kept for selection in selections),
        "read": sum(selection.end for selection in selections),
        "dropped": dict(sorted(reasons.items())),
        "tars": [{"tar": s.tar, "read": s.end, "kept": s.num_kept} for s in selections],
    }
    return report | (_compared(found, problematic, report["read"]) if problematic else {})


def _found_indices(staging: StagingDir, selections: list[TarSelection]) -> set[int]:
    """Return the indices in the raw set of all samples that cannot be read, listed or not."""
    return {
        selection.first + row.position
        for selection in selections
        for row in _require_cleaned(staging, selection.tar).dropped
        if row.reason in _PROBLEMATIC and row.position < selection.end
    }


def _compared(found: set[int], listed: frozenset[int], num_read: int) -> dict[str, Any]:
    """Return how the unreadable samples that were ``found`` differ from the given list, where both looked."""
    seen = {index for index in listed if index < num_read}
    only_found, only_listed = sorted(found - seen), sorted(seen - found)
    return {
        "unreadable_but_not_listed": len(only_found),
        "listed_but_readable": len(only_listed),
        "problematic_indices": {"only_found": only_found, "only_listed": only_listed},
    }


def _dropped_rows(selection: TarSelection, cleaned: CleanedTar) -> Iterator[dict[str, Any]]:
    """Yield the dropped samples before the end of ``selection``, in order."""
    rows = [
        (
            row.position,
            row.key,
            LISTED if row.position in selection.listed else row.reason,
            row.detail,
        )
        for row in cleaned.dropped
    ]
    rows += [(at, "", LISTED, "it could be read") for at in selection.listed & set(cleaned.kept)]
    for position, key, reason, detail in sorted(rows):
        if position < selection.end:
            row = {"index": selection.first + position, "tar": selection.tar, "key": key}
            yield {**row, "reason": reason, "detail": detail}


def _require_cleaned(staging: StagingDir, name: str) -> CleanedTar:
    cleaned = read_cleaned_tar(staging, name)
    if cleaned is None:
        raise DataError(f"{staging.work}: the record of {name} has disappeared")
    return cleaned


def _parse_index(text: str) -> int:
    if not text.isdigit() or len(text) > 18:
        raise ValueError(text[:50])
    return int(text)


def _digest(problematic: frozenset[int]) -> str | None:
    text = "\n".join(map(str, sorted(problematic)))
    return hashlib.sha256(text.encode()).hexdigest() if problematic else None
