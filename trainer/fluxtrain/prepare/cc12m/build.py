"""CC12M for MLPerf: raw ``cc12m-wds`` tars in, cleaned tars out, as the reference cleans them.

In the order of the raw set: unreadable samples and those with a side below 256 pixels are left out, and the
first 1,099,776 of the others make the set. Tars are cleaned in parallel and independently; what is cleaned
outlives SIGKILL; the choice of the first samples comes last, so the result does not depend on the workers.

    OUTPUT/cc12m-train-0000.tar …   as data/tars.py reads them, with their indices
    OUTPUT/dropped.jsonl            every sample that was left out, and why
    OUTPUT/report.json              how many, by reason and by tar
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

import PIL

from fluxtrain.errors import ConfigError, DataError
from fluxtrain.files import atomic_write
from fluxtrain.prepare.cc12m.clean_tar import (
    Record,
    Summary,
    clean_tar,
    keep_only,
    read_record,
    remove,
)
from fluxtrain.prepare.cc12m.image import UNREADABLE
from fluxtrain.prepare.cc12m.source import Source
from fluxtrain.prepare.image import PNG_LEVEL, SIZE
from fluxtrain.prepare.openmoji.cached_build import Advance, Follow, progress
from fluxtrain.prepare.staging_dir import Settings, StagingDir, finished_report, open_staging_dir
from fluxtrain.prepare.worker_pool import available_cores, map_in_order

NUM_SAMPLES = 1_099_776
LISTED = "listed as problematic"
_FORMAT = 1
_MAX_LISTED_BYTES = 1 << 26


@dataclass(frozen=True)
class Part:
    """What one raw tar gives: of its samples, the kept ones before ``end`` that are not ``listed``.

    ``first`` is its first sample's index in the raw set; ``end`` and ``listed`` are positions in the tar.
    """

    tar: str
    first: int
    end: int
    listed: frozenset[int]
    num_kept: int

    def fits(self, position: int) -> bool:
        """Return whether the sample there may stay."""
        return position < self.end and position not in self.listed


def prepare_cc12m(
    source: Source,
    output: Path,
    num_samples: int | None = NUM_SAMPLES,
    problematic: frozenset[int] = frozenset(),
    num_workers: int | None = None,
    force: bool = False,
    stream: TextIO = sys.stderr,
    follow: Follow | None = None,
) -> dict[str, Any]:
    """Make ``output`` of the tars in ``source``, or go on where it was left; return the report.

    ``num_samples`` None takes all; ``problematic`` are indices that are left out whatever they hold;
    ``follow`` hears how many samples are done of how many, or tars where all samples are taken.
    Raises DataError where a tar is not whole or too few samples are fit, StorageError where the disk fails.
    """
    cleaning: Settings = {
        "format": _FORMAT,
        "size": SIZE,
        "png_level": PNG_LEVEL,
        "pillow": PIL.__version__,
    }
    settings = {**cleaning, "samples": num_samples, "problematic": _digest(problematic)}
    report = None if force else finished_report(output, settings)
    if report is None:
        names = source.names()
        with open_staging_dir(output, cleaning, force) as draft:
            clean = partial(clean_tar, source=source, draft=draft)
            with (
                progress("clean", num_samples or len(names), stream, follow) as advance,
                closing(map_in_order(clean, names, num_workers or available_cores())) as cleaned,
            ):
                parts = list(_chosen(cleaned, draft, num_samples, problematic, advance))
            _require(parts, num_samples)
            report = {"settings": settings, **_finished(draft, parts, bool(problematic))}
            draft.finish(report)
    print(f"{output}: {told(report)}", file=stream, flush=True)
    return report


def read_problematic(path: Path) -> frozenset[int]:
    """Return the indices in ``path``, one a line, as the reference's list has them; ConfigError otherwise."""
    try:
        with path.open("rb") as file:
            words = file.read(_MAX_LISTED_BYTES).decode("ascii").split()
        return frozenset(map(_index, words))
    except OSError as error:
        raise ConfigError("--problematic", str(path), str(error.strerror)) from None
    except ValueError as error:
        raise ConfigError("--problematic", str(path), f"not one index a line: {error}") from None


def told(report: dict[str, Any]) -> str:
    """Return the report in one sentence."""
    reasons = [f"{count:,} {reason}" for reason, count in report["dropped"].items()]
    return f"{report['kept']:,} of {report['read']:,} samples kept; left out: " + (
        ", ".join(reasons) or "none"
    )


def _chosen(
    summaries: Iterator[Summary],
    draft: StagingDir,
    num_samples: int | None,
    problematic: frozenset[int],
    advance: Advance,
) -> Iterator[Part]:
    """Yield the parts of the set until it has ``num_samples``; nothing after that is cleaned."""
    first = kept = 0
    for summary in summaries:
        left = None if num_samples is None else num_samples - kept
        part = _part(summary, first, draft, problematic, left)
        first, kept = first + summary.num_samples, kept + part.num_kept
        advance(1 if num_samples is None else part.num_kept)
        yield part
        if kept == num_samples:
            return


def _part(
    summary: Summary, first: int, draft: StagingDir, problematic: frozenset[int], left: int | None
) -> Part:
    """Return what the cleaned tar of ``summary`` gives where ``left`` samples are still wanted."""
    after = first + summary.num_samples
    listed = frozenset(index - first for index in problematic if first <= index < after)
    if not listed and (left is None or summary.num_kept < left):
        return Part(summary.tar, first, summary.num_samples, listed, summary.num_kept)
    kept = [at for at in _record(draft, summary.tar).kept if at not in listed]
    if left is None or len(kept) < left:
        return Part(summary.tar, first, summary.num_samples, listed, len(kept))
    return Part(summary.tar, first, kept[left - 1] + 1, listed, left)


def _require(parts: list[Part], num_samples: int | None) -> None:
    kept = sum(part.num_kept for part in parts)
    if num_samples is not None and kept < num_samples:
        read = parts[-1].first + parts[-1].end
        raise DataError(
            f"only {kept:,} of {read:,} samples are fit and {num_samples:,} are wanted: tars are missing, "
            "or --samples all takes what there is; what is cleaned is kept"
        )
    if not kept:
        raise DataError("none of the samples is fit")


def _finished(draft: StagingDir, parts: list[Part], is_listed: bool) -> dict[str, Any]:
    """Leave in ``draft`` exactly the samples of ``parts``, and return the report on them."""
    wanted = {part.tar for part in parts}
    for path in sorted(draft.folder.glob("*.tar")):
        if path.name not in wanted:
            remove(path.name, draft)
    reasons, unlisted, rows = Counter[str](), 0, list[dict[str, Any]]()
    with atomic_write(draft.folder / "dropped.jsonl") as growing, growing.open("w") as file:
        for part in parts:
            record = _record(draft, part.tar)
            dropped = list(_dropped(part, record))
            file.writelines(f"{json.dumps(row)}\n" for row in dropped)
            reasons.update(row["reason"] for row in dropped)
            unlisted += sum(row["reason"] == UNREADABLE for row in dropped)
            rows.append({"tar": part.tar, "read": part.end, "kept": part.num_kept})
    for part in parts:
        keep_only(part.tar, draft, _record(draft, part.tar), part.fits)
    report = {
        "kept": sum(part.num_kept for part in parts),
        "read": sum(part.end for part in parts),
        "dropped": dict(sorted(reasons.items())),
        "tars": rows,
    }
    return report | ({"unreadable_but_not_listed": unlisted} if is_listed else {})


def _dropped(part: Part, record: Record) -> Iterator[dict[str, Any]]:
    """Yield the samples before the end of ``part`` that are left out, in order."""
    rows = [(row.position, row.key, row.reason, row.detail) for row in record.dropped]
    readable = set(record.kept)
    rows = [(at, key, LISTED if at in part.listed else why, more) for at, key, why, more in rows]
    rows += [(at, "", LISTED, "it could be read") for at in part.listed & readable]
    for position, key, reason, detail in sorted(rows):
        if position < part.end:
            row = {"index": part.first + position, "tar": part.tar, "key": key}
            yield {**row, "reason": reason, "detail": detail}


def _record(draft: StagingDir, name: str) -> Record:
    record = read_record(draft, name)
    if record is None:
        raise DataError(f"{draft.work}: the record of {name} has vanished")
    return record


def _index(word: str) -> int:
    if not word.isdigit() or len(word) > 18:
        raise ValueError(word[:50])
    return int(word)


def _digest(problematic: frozenset[int]) -> str | None:
    text = "\n".join(map(str, sorted(problematic)))
    return hashlib.sha256(text.encode()).hexdigest() if problematic else None
