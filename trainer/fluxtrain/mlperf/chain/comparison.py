"""Whether a log has exactly the lines of its chain, and which is the first that differs."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.mlperf.chain.record import LINE, RESUME, Record
from fluxtrain.mlperf.chain.replay import lines_of
from fluxtrain.mlperf.chain.verdict import Verdict
from fluxtrain.mlperf.lines import TOKEN, parse

_KILLED = "the process was killed between the two writes"


def compare(log: bytes, records: Sequence[Record], verdict: Verdict) -> None:
    """Name the first line of ``log`` that is not that of the chain's ``records``."""
    texts, torn = log_lines(log)
    if (number := _first_stranger(log)) is not None:
        verdict.find(
            f"line {number} was inserted: the run wrote no line without {TOKEN} at its beginning"
        )
    chained = [line.text for line in lines_of(records)]
    last = records[-1].kind if records else None
    if last == RESUME and texts != chained:
        before = [line.text for line in lines_of(records[:-1])]
        if texts in (before, before[:-1]):
            verdict.note("the log is not yet that of the last resume: the process was killed first")
            return
    if torn:
        if last == LINE and texts == chained[:-1] and chained[-1].startswith(torn):
            verdict.note(f"the last line of the log is torn: {_KILLED}; the chain has all of it")
        else:
            verdict.find(f"line {len(texts) + 1} is cut off: {_brief(torn)}")
        return
    if last == LINE and texts == chained[:-1]:
        verdict.note(f"the log lacks the last line, which the chain has: {_KILLED}")
    elif texts != chained:
        verdict.find(first_difference(texts, chained))


def log_lines(content: bytes) -> tuple[list[str], str]:
    """Return the lines with MLCommons' token, from it on, and such a last line without its newline."""
    *whole, last = content.decode("latin-1").split("\n")
    texts = [TOKEN + line.rsplit(TOKEN, 1)[1] for line in whole if TOKEN in line]
    return texts, TOKEN + last.rsplit(TOKEN, 1)[1] if TOKEN in last else last


def _first_stranger(content: bytes) -> int | None:
    """Return the number of the first line that does not begin with the token; the last one may be torn."""
    token = TOKEN.encode()
    lines = content.split(b"\n")
    strangers = (number for number, line in enumerate(lines[:-1], 1) if not line.startswith(token))
    return next(strangers, None)


def first_difference(texts: Sequence[str], chained: Sequence[str]) -> str:
    """Return what is wrong with the first of ``texts`` that is not that of ``chained``."""
    pairs = zip(texts, chained, strict=False)
    equal = min(len(texts), len(chained))
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), equal)
    place = f"line {at + 1}"
    if at == len(texts):
        count = len(chained) - at
        return f"{place} ({_brief(chained[at])}) is missing, and {count - 1} after it: the end was removed"
    found = texts[at]
    if at == len(chained):
        again = " a second time" if found in chained else ""
        return f"{place} ({_brief(found)}) was inserted{again}: the chain ends before it"
    if found.rstrip("\r") == chained[at]:
        return f"{place} ({_brief(chained[at])}) ends with a carriage return: the log was converted"
    if found in chained[at + 1 :]:
        if chained[at] in texts[at + 1 :]:
            return f"{place} ({_brief(chained[at])}) was moved: {_brief(found)} is in its place"
        return f"{place} ({_brief(chained[at])}) was removed: {_brief(found)} is in its place"
    if chained[at] in texts[at + 1 :]:
        again = " a second time" if found in chained else ""
        return f"{place} ({_brief(found)}) was inserted{again} before {_brief(chained[at])}"
    return f"{place} ({_brief(chained[at])}) was changed in {_changed(found, chained[at])}"


def _changed(found: str, chained: str) -> str:
    one, other = parse(0, found), parse(0, chained)
    if one.fault:
        return f"its text: {one.fault}"
    names = [name for name in other.fields if one.fields.get(name) != other.fields[name]]
    texts = (
        f"{each}: {other.fields[each]!r:.60} became {one.fields.get(each)!r:.60}" for each in names
    )
    return "; ".join(texts) or "its bytes"


def _brief(text: str) -> str:
    return parse(0, text).key[:60] or text[:60]
