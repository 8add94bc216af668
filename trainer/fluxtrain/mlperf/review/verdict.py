"""One result as a committee sees it: whose it is, its score, its convergence, and what the review says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from math import isfinite
from multiprocessing import get_context

from fluxtrain.contract.run.presets import MLPERF_TARGET_LOSS
from fluxtrain.errors import ConfigError
from fluxtrain.mlperf import rcp
from fluxtrain.mlperf.compliance import describe_fit, sanitize
from fluxtrain.mlperf.evidence import Result
from fluxtrain.mlperf.log_lines import LogLine, target_of
from fluxtrain.mlperf.review.result_rules import Finding
from fluxtrain.mlperf.review.review import (
    COMPLIANCE,
    RULES,
    number_of,
    of_kind,
    review,
    split,
    unknowns,
)
from fluxtrain.mlperf.review.tree import Place, Tree, dated, describe, fit_of, whose
from fluxtrain.runtime.progress import counted

Curve = tuple[str, Sequence[tuple[float, float]]]
"""The name of a run, and samples and loss of its evaluations."""
HEADINGS = (
    *("ORGANISATION", "SYSTEM", "DIVISION", "RULESET", "MINUTES", "SAMPLES", "CONVERGED"),
    *("REFERENCE", "FINDINGS", "NOTES"),
)
NUMBERS = ("MINUTES", "SAMPLES", "CONVERGED", "FINDINGS", "NOTES")
_LONGEST = 40
_LEAST_COMMON = 5  # evaluations
_COPIED = "A run is of one result; leave it out of the others."
_LEAST_LOSS, _MOST_LOSS = 1e-9, 1e9


@dataclass(frozen=True)
class Verdict:
    """What a review keeps of a result; its logs may be gone."""

    name: str
    found: str
    """In words: whose it is, and what of it was found."""
    in_package: bool
    row: Sequence[str]
    """The cells under `HEADINGS`."""
    logs: int
    ruleset: str
    needs: Mapping[str, Sequence[str]]
    month: str
    """Of the logs, such as 2026-05."""
    mean: float | None
    """Samples that the reference needs, None without a comparison."""
    target: float | None
    curves: Sequence[Curve]
    findings: Sequence[Finding]
    notes: Sequence[Finding]
    unknowns: Sequence[Finding]
    waived: Sequence[Finding]

    @property
    def fits(self) -> str:
        """Return which rulesets the logs pass and what others need."""
        if not self.needs:
            return ""
        passed = all(each.rule != COMPLIANCE for each in self.findings)
        return f"ruleset {self.ruleset}: {describe_fit(self.needs, passed, self.month)}"


def judge(places: Sequence[Place], ruleset: str | None) -> list[Verdict]:
    """Return the verdict on each result, judged several at a time.

    One of several that cannot be read has a finding; of a single one errors are as from `Place.read`.
    """
    if len(places) < 2:
        return [_judge(place, ruleset) for place in places]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as pool:
        return list(_with_copies(list(pool.map(_judge_or_why, places, repeat(ruleset)))))


def _judge_or_why(place: Place, ruleset: str | None) -> Verdict:
    """Return the verdict, or one that says why the result cannot be read."""
    try:
        return _judge(place, ruleset)
    except ConfigError as error:
        result = Result(place.name, [], folder=place.folder)
        found = [Finding("readable-lines", "", place.name, str(error), "")]
        row = (*whose(result), *"------", "1", "0")
        told = f"{'/'.join(whose(result))}: not reviewed"
        return Verdict(
            place.name, told, True, row, 0, "-", {}, "", None, None, (), found, (), (), ()
        )


def _with_copies(verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """Yield the verdicts, with a finding where runs have the losses of another result's."""
    owners: dict[tuple[tuple[float, float], ...], str] = {}
    for each in verdicts:
        copied = dict[str, str]()
        for name, points in each.curves:
            owner = owners.setdefault(tuple(points), each.name)
            if len(points) >= _LEAST_COMMON and owner != each.name:
                copied[name] = owner
        if not copied:
            yield each
            continue
        runs = f"{counted(len(copied), 'run')}, such as {next(iter(copied))},"
        text = f"{runs} with the losses of runs of {' and '.join(dict.fromkeys(copied.values()))}"
        found = Finding("runs-are-different-runs", "12", each.name, text, _COPIED)
        findings = [*each.findings, found]
        row = (*each.row[:-2], str(number_of(findings)), each.row[-1])
        yield replace(each, findings=findings, row=row)


def _judge(place: Place, ruleset: str | None) -> Verdict:
    result = place.read(ruleset)
    standing, waived = split(review(result), result)
    findings, notes = of_kind(standing, "finding"), of_kind(standing, "note")
    mean, cells = _score(result)
    first = result.runs[0] if result.runs else None
    division = sanitize(str((first and first.value("submission_division")) or "-"))
    counts = (str(number_of(findings)), str(number_of(notes)))
    return Verdict(
        result.name,
        describe(result),
        result.folder is not None,
        (*whose(result), division, result.ruleset, *cells, *counts),
        len(result.runs),
        result.ruleset,
        fit_of(result),
        dated(result),
        mean,
        MLPERF_TARGET_LOSS if first is None else target_of(first.lines),
        [(run.name, _points(run.all("eval_accuracy"))) for run in result.runs],
        findings,
        notes,
        list(unknowns([result])),
        waived,
    )


def _points(lines: Sequence[LogLine]) -> list[tuple[float, float]]:
    found = [(line.samples or 0, line.measured or 0.0) for line in lines]
    return [(float(at), loss) for at, loss in found if at >= 0 and _LEAST_LOSS < loss < _MOST_LOSS]


def _score(result: Result) -> tuple[float | None, tuple[str, str, str, str]]:
    """Return the reference's samples, and in words score, samples, runs converged and the comparison."""
    runs, ruleset = result.runs, result.ruleset
    converged = f"{sum(run.succeeded for run in runs)}/{len(runs)}"
    size = runs[0].number("global_batch_size") if runs else None
    if len(runs) < 3 or size is None:
        return None, ("-", "-", converged, "-")
    compared = rcp.compare_with_reference([run.samples for run in runs], size, ruleset)
    factor = compared.scaling_factor if compared.accepted else 1.0
    minutes = rcp.score([run.minutes for run in runs], factor if result.closed else 1.0)
    mean = None if compared.point is None else compared.point.mean
    if not result.closed:
        told = "open"
    elif len(runs) != rcp.NUM_RUNS:
        told = f"needs {rcp.NUM_RUNS} runs"
    else:
        told = "accepted" if compared.accepted else "refused"
        told += f", x {factor:.4f}" if factor > 1 else ""
    shown = [f"{minutes:.2f}" if isfinite(minutes) else "-"]
    shown += [f"{compared.mean:,.0f}" if isfinite(compared.mean) else "-"]
    return mean, (shown[0], shown[1], converged, told)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a row for each result, for a terminal."""
    rows = [HEADINGS, *([sanitize(cell, _LONGEST) for cell in each.row] for each in verdicts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if heading in NUMBERS else cell.ljust(width)
            for heading, cell, width in zip(HEADINGS, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def headline(verdicts: Sequence[Verdict]) -> str:
    """Return the whole review in a line."""
    logs = counted(sum(each.logs for each in verdicts), "log")
    if number := sum(number_of(each.findings) for each in verdicts):
        return f"FAILED: {counted(number, 'finding')} in {logs}"
    used = " and ".join(sorted({each.ruleset for each in verdicts}))
    return f"PASSED: {len(RULES)} rules, {logs}, ruleset {used}"


def told(verdicts: Sequence[Verdict], tree: Tree) -> dict[str, object]:
    """Return the review as JSON has it."""
    kinds = ("findings", "notes", "unknowns", "waived")
    names = ("name", "logs", "ruleset", "needs")
    return {
        "passed": not any(each.findings for each in verdicts),
        "results": [
            {name: getattr(each, name) for name in names}
            | {"row": dict(zip(map(str.lower, HEADINGS), each.row, strict=True))}
            for each in verdicts
        ],
        "others": tree.others,
        **{
            kind: [
                asdict(finding) | {"result": each.name}
                for each in verdicts
                for finding in getattr(each, kind)
            ]
            for kind in kinds
        },
    }
