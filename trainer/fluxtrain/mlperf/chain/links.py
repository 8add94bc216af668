"""Whether each record of a chain follows the one before it, and what the resumes changed in the log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from fluxtrain.mlperf.chain.record import LINE, NONE_BEFORE, START, Record, digest, parse
from fluxtrain.mlperf.chain.replay import ChainedLine, after
from fluxtrain.mlperf.chain.verdict import Verdict
from fluxtrain.mlperf.lines import LogLine
from fluxtrain.mlperf.lines import parse as parse_line

_ENDED_AGAIN = ("run_stop", "eval_start")
"""Events that a resume may remove although they are not after its checkpoint: the run goes on."""


def check_links(lines: Sequence[bytes], verdict: Verdict) -> None:
    """Name the first record that does not follow the one before it."""
    previous = NONE_BEFORE
    for index, line in enumerate(lines):
        if (fault := _fault(index, line, previous)) is not None:
            verdict.find(fault)
            return
        previous = digest(line)


def _fault(index: int, line: bytes, previous: str) -> str | None:
    place = f"record {index}"
    if line.endswith(b"\r"):
        return f"{place} ends with a carriage return: the chain was converted"
    try:
        record = parse(line)
    except ValueError as error:
        return f"{place} was changed: it is no record ({error})"
    if record.number > index:
        return f"{place} is missing: record {record.number} follows record {index - 1}"
    if record.number < index:
        return f"{place} was inserted: it says that it is record {record.number}"
    if record.previous != previous:
        before = f"record {index - 1}, or one before it," if index else "the beginning"
        return f"{before} was changed: {place} follows another one"
    if (record.kind == START) != (index == 0):
        return f"{place} is a {record.kind}: a chain has one start, at its beginning"
    return None


def check_resumes(records: Sequence[Record], verdict: Verdict) -> None:
    """Name the lines that a resume removed or took up, but not because it went back to its checkpoint."""
    lines, before = list[ChainedLine](), LINE
    for record in records:
        if record.adopted:
            place = f"record {record.number} ({record.kind})"
            count = len(record.adopted)
            verdict.find(
                f"{place}: {count} lines were in the log without a record, the first of them "
                f"{_key(record.adopted[0])}: written into it between two attempts, or before it had a chain"
            )
        for number in _wrongly_dropped(lines, record, before):
            text = next(line.text for line in lines if line.number == number)
            verdict.find(
                f"record {number} ({_key(text)}): its line was removed from the log before "
                f"record {record.number} resumed the run"
            )
            break
        lines, before = after(lines, record), record.kind
        if record.values.get("torn_bytes"):
            verdict.note(
                f"record {record.number} follows one that was torn when a process was killed"
            )


def _wrongly_dropped(lines: Sequence[ChainedLine], record: Record, before: str) -> list[int]:
    """Return the records of lines that a resume without a fault would have kept."""
    if not record.dropped:
        return []
    samples = record.values.get("samples")
    samples = samples if type(samples) is int else 0
    events = [(line.number, parse_line(line.number, line.text)) for line in lines]
    if samples == 0 and not any(event.key == "run_start" for _, event in events):
        return []  # the run started over
    kept = [*takewhile(lambda each: (each[1].samples or 0) <= samples, events)]
    if before == LINE and kept and kept[-1][0] == events[-1][0]:
        kept.pop()  # the process was killed between the record and the line
    return [number for number, event in kept if _counts(event) and number in record.dropped]


def _counts(event: LogLine) -> bool:
    return event.key not in _ENDED_AGAIN


def _key(text: str) -> str:
    return parse_line(0, text).key or text[:40]
