"""Apply all rules to runs, results and packages, MLCommons' compliance checker among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fluxtrain.mlperf.compliance import check
from fluxtrain.mlperf.evidence import Result, Run
from fluxtrain.mlperf.explain import sanitize
from fluxtrain.mlperf.review import (
    chained,
    enclosed,
    evaluations,
    order,
    package,
    runs,
    samples,
    settings,
)
from fluxtrain.mlperf.review.rule import Finding, Rule
from fluxtrain.mlperf.tools import ToolResult

RUN_RULES: tuple[Rule[Run], ...] = (
    *order.RULES,
    *evaluations.RULES,
    *samples.RULES,
    *settings.RULES,
    *chained.RULES,
)
RESULT_RULES: tuple[Rule[Result], ...] = (*runs.RULES, *package.RULES, *enclosed.RULES)
COMPLIANCE = "compliance-checker"
"""The rule that MLCommons' compliance checker reports nothing, warnings included."""
WARNINGS = "package-checkers"
"""The rule that MLCommons' other tools do not warn of anything."""
_NAMES = [each.name for each in RUN_RULES] + [each.name for each in RESULT_RULES]
RULES = frozenset({*_NAMES, COMPLIANCE, WARNINGS})
"""Names of all rules."""
NEVER = frozenset({runs.ten_runs.name})
"""Of these, rules that nobody can waive."""
_MAX_TEXT = 1000
_MAX_PLACES = 3


def rule_findings(run: Run) -> Iterator[Finding]:
    """Yield what the rules find in one run, without MLCommons' checker."""
    for each in RUN_RULES:
        yield from each.findings(run, run.name, run.closed)


def tool_findings(tools: Iterable[ToolResult], place: str) -> Iterator[Finding]:
    """Yield the warnings of MLCommons' tools for packages that have passed."""
    for tool in tools:
        for message in tool.messages if tool.passed else ():
            yield Finding(WARNINGS, "", place, f"{tool.tool}: {message}", "")


def compliance_findings(run: Run, ruleset: str) -> Iterator[Finding]:
    """Yield the errors and the warnings of MLCommons' compliance checker."""
    checked = check(run.log, ruleset)
    texts = checked.explanations or [sanitize(message) for message in checked.messages]
    for text in texts:
        yield Finding(COMPLIANCE, "", run.name, text, "")


def review(results: Sequence[Result]) -> Iterator[Finding]:
    """Yield what the rules, and MLCommons' compliance checker, find in ``results``.

    Raises ConfigError if the ruleset is unknown or a log cannot be read.
    """
    for result in results:
        for run in result.runs:
            yield from compliance_findings(run, result.ruleset)
        yield from all_rule_findings(result)


def all_rule_findings(result: Result) -> Iterator[Finding]:
    """Yield what the rules find without the checker; a single run outside a package is no result."""
    for run in result.runs:
        yield from rule_findings(run)
    if result.folder is not None or result.description is not None or len(result.runs) > 1:
        yield from result_findings(result)


def result_findings(result: Result) -> Iterator[Finding]:
    """Yield what the rules find in the runs of one result together."""
    for each in RESULT_RULES:
        yield from each.findings(result, result.name, result.closed)


def split(
    findings: Iterable[Finding], results: Sequence[Result]
) -> tuple[list[Finding], list[Finding]]:
    """Return the findings that stand, and those that a package's submitter has waived."""
    given = [waiver for result in results for waiver in result.waivers.items()]
    waived = {rule for rule, reason in given if reason.strip() and rule not in NEVER}
    found = list(findings)
    standing = [each for each in found if each.rule not in waived]
    return standing, [each for each in found if each.rule in waived]


def render(findings: Sequence[Finding]) -> str:
    """Return the findings for a terminal: a numbered paragraph for each, with the logs that have it."""
    places: dict[Finding, list[str]] = {}
    for each in findings:
        places.setdefault(replace(each, place=""), []).append(sanitize(each.place))
    lines = []
    for number, (each, where) in enumerate(places.items(), 1):
        section = f" (training rules {each.section})" if each.section else ""
        text = sanitize(each.text, _MAX_TEXT).rstrip(".")
        paragraph = f"{each.rule}{section}: {_places(where)}{text}. {each.fix}"
        lines.append(f"  {number}. {paragraph.rstrip()}")
    return "\n".join(lines)


def _places(names: Sequence[str]) -> str:
    if not any(names):
        return ""
    shown = ", ".join(names[:_MAX_PLACES])
    more = len(names) - _MAX_PLACES
    return f"{shown} and {more} more: " if more > 0 else f"{shown}: "
