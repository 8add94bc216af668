"""Which lines the log has after each record: a resume removes those after its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fluxtrain.mlperf.chain.record import LINE, RESUME, START, Record


@dataclass(frozen=True)
class ChainedLine:
    """A line of the log, and the number of the record that has it."""

    number: int
    text: str


def after(lines: Sequence[ChainedLine], record: Record) -> list[ChainedLine]:
    """Return the lines of the log after ``record``, which were ``lines`` before it."""
    if record.kind == LINE:
        return [*lines, ChainedLine(record.number, record.text)]
    if record.kind in (START, RESUME):
        dropped = record.dropped
        kept = [line for line in lines if line.number not in dropped]
        return [*kept, *(ChainedLine(record.number, text) for text in record.adopted)]
    return list(lines)


def lines_of(records: Iterable[Record | None]) -> list[ChainedLine]:
    """Return the lines of the log after all ``records``; None, which is no record, changes nothing."""
    lines = list[ChainedLine]()
    for record in records:
        if record is not None and record.kind == LINE:
            lines.append(ChainedLine(record.number, record.text))
        elif record is not None:
            lines = after(lines, record)
    return lines


def difference(lines: Sequence[ChainedLine], kept: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the records of ``lines`` not in ``kept``, and the texts in ``kept`` without one."""
    dropped, adopted, position = list[int](), list[str](), 0
    texts = [line.text for line in lines]
    for text in kept:
        try:
            found = texts.index(text, position)
        except ValueError:
            adopted.append(text)
            continue
        dropped += [line.number for line in lines[position:found]]
        position = found + 1
    return dropped + [line.number for line in lines[position:]], adopted
