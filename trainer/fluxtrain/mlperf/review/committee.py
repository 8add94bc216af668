"""A page for a committee: a row for each result, its runs' evaluation loss, and what the review says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from fluxtrain import __version__
from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.compliance import sanitize
from fluxtrain.mlperf.review.review import number_of, paragraphs, render_unknowns
from fluxtrain.mlperf.review.verdict import HEADINGS, NUMBERS, Verdict
from fluxtrain.report.page import PAGE_START, Chart, Series, document
from fluxtrain.runtime.files import writing
from fluxtrain.runtime.progress import counted

_STYLE = """
.results th, .results td { padding: .35rem 1.4rem .35rem 0; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
.results th { color: var(--faint); font-size: .82rem; font-weight: 500; }
.results .number { text-align: right; }
.results a, section a { color: var(--blue); text-decoration: none; }
.bad { color: var(--red); font-weight: 600; }
section { border-top: 1px solid var(--line); margin-top: 2.4rem; }
section .chart { max-width: 62rem; }
section ol { margin: .3rem 0 1rem; padding-left: 1.6rem; max-width: 62rem; }
section li { overflow-wrap: anywhere; margin: .25rem 0; }
section h3 { margin-top: 1.2rem; font-weight: 600; }
section .plot { height: 19rem; }
.legend li { max-width: 16rem; }
.reference { --own: var(--faint); }
polyline.reference { stroke-dasharray: 2 4; stroke-width: 2; }
"""
_COLOURS = 6


def write_page(path: Path, verdicts: Sequence[Verdict], left_out: str) -> None:
    """Write the page; raise StorageError if it cannot be written, ConfigError if another file is there."""
    with writing(path):
        if path.is_file() and not path.read_bytes().startswith(PAGE_START.encode()):
            text = "is a file that no review has written; name another one"
            raise ConfigError("--html", str(path), text)
        path.write_text(page(verdicts, left_out), encoding="utf-8")


def page(verdicts: Sequence[Verdict], left_out: str) -> str:
    """Return the page; texts of logs and folders are escaped by it."""
    logs = counted(sum(each.logs for each in verdicts), "log")
    title = f"Review of {counted(len(verdicts), 'result')} of flux1"
    total = sum(number_of(each.findings) for each in verdicts)
    told = f"{counted(total, 'finding')} in {logs}{'. ' if left_out else ''}{left_out}."
    parts = [
        f"<p>{escape(told)}</p>",
        _table(verdicts),
        *(_section(number, each) for number, each in enumerate(verdicts)),
        "<footer>A finding breaks a rule, a note is what a reviewer asks about, unknown is what the files "
        f"cannot show. <span>fluxtrain {__version__}</span></footer>",
    ]
    return document(title, parts, _STYLE)


def _table(verdicts: Sequence[Verdict]) -> str:
    kinds = ["number" if heading in NUMBERS else "" for heading in HEADINGS]
    head = "".join(
        f'<th class="{kind}">{heading.capitalize()}</th>'
        for kind, heading in zip(kinds, HEADINGS, strict=True)
    )
    rows = "".join(_row(number, each, kinds) for number, each in enumerate(verdicts))
    return f'<div class="wide"><table class="results"><tr>{head}</tr>{rows}</table></div>'


def _row(number: int, verdict: Verdict, kinds: Sequence[str]) -> str:
    cells = [escape(cell) for cell in verdict.row]
    cells[1] = f'<a href="#result{number}">{cells[1]}</a>'
    bad = {HEADINGS.index("FINDINGS")} if verdict.findings else set()
    bad |= {HEADINGS.index("REFERENCE")} if "refused" in verdict.row else set()
    shown = "".join(
        f'<td class="{kind}{" bad" if index in bad else ""}">{cell}</td>'
        for index, (kind, cell) in enumerate(zip(kinds, cells, strict=True))
    )
    return f"<tr>{shown}</tr>"


def _section(number: int, verdict: Verdict) -> str:
    return (
        f'<section id="result{number}"><h2>{escape(" / ".join(verdict.row[:2]))}</h2>'
        f"<p>{escape(sanitize(verdict.found, 500))}<br><small>{escape(verdict.fits)}</small></p>"
        f"{_chart(verdict)}{''.join(_kinds(verdict))}</section>"
    )


def _chart(verdict: Verdict) -> str:
    """Return the loss of all runs over samples, the target, and where the reference reaches it."""
    curves = [(name, points) for name, points in verdict.curves if points]
    if not curves:
        return '<p class="note">no evaluation</p>'
    values = [loss for _, points in curves for _, loss in points]
    series = [
        Series(sanitize(name), f"run{index % _COLOURS}", points)
        for index, (name, points) in enumerate(curves)
    ]
    if verdict.mean is not None:
        ends = [(verdict.mean, min(values)), (verdict.mean, max(values))]
        series.append(Series("mean of the reference", "reference", ends))
    chart = Chart("Evaluation loss over samples", series, is_log=True, target=verdict.target)
    return chart.html(chart.last)


def _kinds(verdict: Verdict) -> Iterator[str]:
    for title, found in (
        ("Findings", verdict.findings),
        ("Notes", verdict.notes),
        ("Waived by the submitter", verdict.waived),
    ):
        yield from _list(title, paragraphs(found))
    unknown = render_unknowns(verdict.unknowns).splitlines()
    yield from _list("Unknown", [text.removeprefix("unknown, ") for text in unknown])


def _list(title: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        yield f"<h3>{title}</h3><ol>{items}</ol>"
