"""Apply all rules to runs, results and packages, MLCommons' compliance checker among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.compliance import ToolResult, check, sanitize
from fluxtrain.mlperf.evidence import Result, Run
from fluxtrain.mlperf.rcp import NUM_RUNS
from fluxtrain.mlperf.review import package_rules, plausibility, result_rules, run_rules
from fluxtrain.mlperf.review.result_rules import EVIDENCE, Finding, Kind, Rule
from fluxtrain.runtime.progress import first_of

RESULT_RULES: tuple[Rule[Result], ...] = (
    *result_rules.RULES,
    *package_rules.RULES,
    *plausibility.RESULT_RULES,
)
COMPLIANCE = "compliance-checker"
"""The rule that MLCommons' compliance checker reports nothing, warnings included."""
WARNINGS = "package-checkers"
"""The rule that MLCommons' other tools do not warn of anything."""
RUN_RULES: tuple[Rule[Run], ...] = (*run_rules.RULES, *plausibility.RUN_RULES)
_NAMES = [each.name for each in RUN_RULES] + [each.name for each in RESULT_RULES]
RULES = frozenset({*_NAMES, COMPLIANCE, WARNINGS})
NEVER = frozenset({result_rules.ten_runs.name})
"""Of these, rules that nobody can waive."""
_MISSED = (
    "the target was not reached, which one run of ten may: it is the slowest, and not in the mean"
)
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


def compliance_findings(run: Run, ruleset: str, may_miss: bool = False) -> Iterator[Finding]:
    """Yield what MLCommons' compliance checker says, warnings too, but for a target that may be missed."""
    checked = check(run.log, ruleset, run.lines)
    if may_miss and checked.only_missed:
        yield Finding(COMPLIANCE, "12", run.name, _MISSED, "", "note")
        return
    texts = checked.explanations or [sanitize(message) for message in checked.messages]
    for text in texts:
        yield Finding(COMPLIANCE, "", run.name, text, "")


def review(result: Result) -> Iterator[Finding]:
    """Yield what the rules, and MLCommons' compliance checker, find in ``result``.

    Of ten runs one may miss the target: it counts as the slowest, which the mean leaves out (rules, 12).
    Raises ConfigError if the ruleset is unknown or a log cannot be read.
    """
    lost = [run for run in result.runs if not run.succeeded]
    for run in result.runs:
        may_miss = [run] == lost and len(result.runs) >= NUM_RUNS
        yield from compliance_findings(run, result.ruleset, may_miss)
    yield from all_rule_findings(result)


def all_rule_findings(result: Result) -> Iterator[Finding]:
    """Yield what the rules find without the checker; a single run outside a package is no result."""
    for run in result.runs:
        yield from rule_findings(run)
    if result.folder is not None or result.description is not None or len(result.runs) > 1:
        yield from result_findings(result)


def unknowns(results: Iterable[Result]) -> Iterator[Finding]:
    """Yield for each rule on a run what it needs and the given files do not have."""
    for run in (run for result in results for run in result.runs):
        missing = {name for name, is_in in EVIDENCE.items() if not is_in(run)}
        for each in RUN_RULES:
            if each.needs in missing and (run.closed or not each.closed_only):
                text = f"there is no {each.needs}"
                yield Finding(each.name, each.section, run.name, text, "", "unknown")


def of_kind(findings: Iterable[Finding], kind: Kind) -> list[Finding]:
    return [each for each in findings if each.kind == kind]


def render_unknowns(findings: Iterable[Finding]) -> str:
    """Return the unknowns for a terminal: a line for each missing evidence, with its rules."""
    rules: dict[str, dict[str, None]] = {}
    for each in findings:
        rules.setdefault(each.text, {})[each.rule] = None
    return "\n".join(f"unknown, as {text}: {', '.join(names)}" for text, names in rules.items())


def result_findings(result: Result) -> Iterator[Finding]:
    """Yield what the rules find in the runs of one result together."""
    for each in RESULT_RULES:
        yield from each.findings(result, result.name, result.closed)


def split(findings: Iterable[Finding], result: Result) -> tuple[list[Finding], list[Finding]]:
    """Return the findings that stand, and those that the package's submitter has waived."""
    given = result.waivers.items()
    waived = {rule for rule, reason in given if reason.strip() and rule not in NEVER}
    found = list(findings)
    standing = [each for each in found if each.rule not in waived]
    return standing, [each for each in found if each.rule in waived]


def number_of(findings: Iterable[Finding]) -> int:
    """Return how many paragraphs `render` numbers: the same finding in ten logs is one."""
    return len(_with_places(findings))


def render(findings: Iterable[Finding]) -> str:
    """Return the findings for a terminal: a numbered paragraph for each, with the logs that have it."""
    return "\n".join(f"  {n}. {text}" for n, text in enumerate(paragraphs(findings), 1))


def paragraphs(findings: Iterable[Finding]) -> list[str]:
    """Return a paragraph for each finding, with the logs that have it."""
    found = []
    for each, where in _with_places(findings).items():
        section = f" (training rules {each.section})" if each.section else ""
        text = sanitize(each.text, _MAX_TEXT).rstrip(".")
        found.append(f"{each.rule}{section}: {_places(where)}{text}. {each.fix}".rstrip())
    return found


def _with_places(findings: Iterable[Finding]) -> dict[Finding, list[str]]:
    """Return each finding without its place, and the places that have it, each once."""
    places: dict[Finding, dict[str, None]] = {}
    for each in findings:
        places.setdefault(replace(each, place=""), {})[sanitize(each.place)] = None
    return {each: list(where) for each, where in places.items()}


def _places(names: Sequence[str]) -> str:
    return f"{first_of(names, _MAX_PLACES)}: " if any(names) else ""


def grouped(texts: Mapping[str, str]) -> str:
    """Return the texts, each once, with the names of the results that have it if there are several."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(sanitize(name))
    several = len(names) > 1
    return "\n".join(f"{_places(where) if several else ''}{text}" for text, where in names.items())


def parse(texts: Iterable[str]) -> dict[str, str]:
    """Return the reason of each waived rule from ``RULE=REASON``; raise ConfigError for other texts."""
    waivers: dict[str, str] = {}
    for text in texts:
        name, _, reason = text.partition("=")
        if name not in RULES:
            allowed = f"no rule of that name; allowed: {', '.join(sorted(RULES))}"
            raise ConfigError("--waive", name, allowed)
        if name in NEVER:
            raise ConfigError("--waive", name, "cannot be waived: there would be no result")
        if not reason.strip():
            raise ConfigError("--waive", text, "must be RULE=REASON; the package shows the reason")
        waivers[name] = reason.strip()
    return waivers
