"""``fluxtrain mlperf package RUN ...``: create an MLCommons submission from ten finished runs."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fluxtrain.cli.arguments import Commands, described, path
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, ConfigError, StorageError

if TYPE_CHECKING:
    from fluxtrain.mlperf.review import FailedRun
    from fluxtrain.mlperf.tools import ToolResult


def add(subcommands: Commands) -> None:
    """Add the command's parser to ``fluxtrain mlperf``."""
    text = "create and check a submission from ten runs"
    package = subcommands.add_parser("package", help=text, description=described(__doc__))
    package.add_argument("runs", type=path, nargs="*", metavar="RUN", help="output folder of a run")
    text = "a run that failed before its end, and why; its log stays in the record"
    package.add_argument("--failed", action="append", default=[], metavar="RUN=REASON", help=text)
    text = "use the FluxTrainings with these labels instead (needs kubectl), such as app=x"
    package.add_argument("--selector", help=text)
    package.add_argument("--namespace", help="namespace of the FluxTrainings (default: kubectl's)")
    text = "system description (default: system.yaml); created as a template if missing"
    default = Path("system.yaml")
    package.add_argument("--system", type=path, default=default, metavar="FILE", help=text)
    text = "a field of the system description, instead of the file's"
    package.add_argument("--answer", action="append", default=[], metavar="FIELD=TEXT", help=text)
    text = "folder to write (default: submission)"
    package.add_argument("--output", type=path, default=Path("submission"), help=text)
    text = "the image that ran, by its digest; needed for closed runs in containers"
    package.add_argument("--image", metavar="NAME@sha256:DIGEST", help=text)
    text = "package in spite of a rule's findings, for this reason, which the package shows"
    package.add_argument("--waive", action="append", default=[], metavar="RULE=REASON", help=text)
    text = "why a field of the job, or a section of fields, is not the reference's; the package shows it"
    package.add_argument("--reason", action="append", default=[], metavar="FIELD=REASON", help=text)
    add_ruleset(package)
    package.set_defaults(action=action)


def add_ruleset(parser: argparse.ArgumentParser) -> None:
    """Add ``--ruleset``."""
    parser.add_argument("--ruleset", default="6.1.0", help="5.1.0, 6.0.0 or 6.1.0 (default: 6.1.0)")


def action(arguments: argparse.Namespace) -> int:
    """Write the package and print the result of each tool; return 0 only if all of them pass."""
    from fluxtrain.mlperf.compliance import require_ruleset

    require_ruleset(arguments.ruleset)
    if bool(arguments.runs) == (arguments.selector is not None):
        raise ConfigError(
            "RUN ...", len(arguments.runs), "give either output folders or --selector"
        )
    from fluxtrain.mlperf.failed_runs import parse_failed

    failed = parse_failed(arguments.failed)
    if arguments.selector is None:
        return _package(arguments, arguments.runs, failed)
    from fluxtrain.mlperf.finished_jobs import collect

    with tempfile.TemporaryDirectory() as folder:
        found = collect(arguments.selector, arguments.namespace, Path(folder))
        return _package(arguments, found.folders, [*found.failed, *failed])


def _package(
    arguments: argparse.Namespace, folders: Sequence[Path], failed: Sequence[FailedRun]
) -> int:
    from fluxtrain.mlperf import (
        implementation,
        rcp,
        review,
        submission,
        system,
        tools,
    )
    from fluxtrain.mlperf.explain import sanitize
    from fluxtrain.mlperf.review.window import median_window

    waivers = review.parse_waivers(arguments.waive)
    reasons = implementation.parse_reasons(arguments.reason)
    all_runs = runs = [review.read_finished_run(folder) for folder in folders]
    if len(runs) > rcp.NUM_RUNS:
        runs = median_window(runs)
        print(
            f"the median of the windows of {rcp.NUM_RUNS} runs: {runs[0].name} to {runs[-1].name}"
        )
    for lost in failed:
        print(f"failed, which stays in the record: {sanitize(f'{lost.name}: {lost.reason}')}")
    result = review.Result("", runs, ruleset=arguments.ruleset, failed=failed)
    submission.require_one_result(all_runs, result, waivers)
    differences = implementation.run_deviations(runs[0], reasons)
    given = arguments.image
    if given is None:
        given = implementation.fetched_image(runs)
    image = implementation.find_image(given, implementation.ran_software(runs), runs[0].closed)
    known = submission.known_fields(runs)
    answers: dict[str, object] = {**system.parse_answers(arguments.answer)}
    if arguments.system.exists():
        answers = {**system.read_answers(arguments.system), **answers}
    elif not system.is_complete({**known, **answers}):
        _write(arguments.system, system.template(known))
        text = "created as a template: replace its nulls"
        raise ConfigError("--system", str(arguments.system), text)
    description = system.describe(known, answers)
    others = [run for run in all_runs if all(run is not each for each in runs)]
    statements = implementation.Statements(waivers, reasons, image, others, failed)
    organisation, name = submission.write_package(runs, description, arguments.output, statements)
    print(f"package: {organisation}")
    closed = runs[0].closed
    checked = []
    for tool in tools.check_package(organisation, name, arguments.ruleset, closed):
        print(f"  {tool.tool:<20} {'passed' if tool.passed else 'FAILED'}", flush=True)
        for message in () if tool.passed else tool.messages:
            print(f"    {message}")
        checked.append(tool)
    scaling = 1.0
    if closed:
        size = runs[0].number("global_batch_size") or 0
        samples = [run.samples for run in runs]
        compared = rcp.compare_with_reference(samples, size, arguments.ruleset)
        print(f"convergence: {rcp.explain(compared, size, arguments.ruleset)}")
        scaling = compared.scaling_factor
    minutes = rcp.score([run.minutes for run in runs], scaling)
    each = ", ".join(f"{run.minutes:.2f}" for run in runs)
    print(f"score: {minutes:.2f} minutes, without the fastest and the slowest of {each}")
    print(f"deviations from the reference: {implementation.summary(differences)}")
    reviewed = _review(organisation / "results" / name / "flux1", checked, arguments.ruleset)
    return EXIT_OK if reviewed and all(tool.passed for tool in checked) else EXIT_ERROR


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None


def _review(result: Path, checked: Sequence[ToolResult], ruleset: str) -> bool:
    """Print what the rules find in the packaged ``result``; return whether all of it is waived."""
    from fluxtrain.mlperf import review
    from fluxtrain.mlperf.explain import counted

    (packaged,) = review.read_results([result], ruleset)
    found = [*review.all_rule_findings(packaged), *review.tool_findings(checked, str(result))]
    findings, waived = review.split(found, [packaged])
    verdict = "FAILED" if findings else "passed"
    print(f"review: {verdict}, {counted(len(findings), 'finding')}, {len(waived)} waived")
    if findings:
        print(review.render(findings))
    return not findings
