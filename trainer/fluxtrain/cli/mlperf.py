"""``fluxtrain mlperf``: check, review, verify and package logs, and the campaign that makes ten of them."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from fluxtrain.cli.arguments import Commands, add_command, path, whole_number, write_text
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, UNSET, ConfigError
from fluxtrain.runtime.progress import counted

if TYPE_CHECKING:
    from fluxtrain.mlperf.chain_verify import Head
    from fluxtrain.mlperf.chain_verify import Verdict as ChainVerdict
    from fluxtrain.mlperf.compliance import ToolResult
    from fluxtrain.mlperf.evidence import FailedRun
    from fluxtrain.mlperf.review.result_rules import Finding
    from fluxtrain.mlperf.review.tree import Tree
    from fluxtrain.mlperf.review.verdict import Verdict


_STATUS = Path("status")
_MOST = 1000


def add_campaign(subcommands: Commands) -> None:
    text = "ten runs from one file, and how far they are"
    parser = add_command(
        subcommands,
        "campaign",
        run_campaign,
        text,
        "Print or apply the runs of a result; ``status`` reports on them.",
    )
    text = "a FluxTraining, as YAML; or the word status"
    parser.add_argument("file", type=path, metavar="FILE|status", help=text)
    text = "with status: what review takes, such as logs, output folders and results"
    parser.add_argument("paths", type=path, nargs="*", default=[], metavar="PATH", help=text)
    text = "runs (default: 10); of more, the consecutive ten with the median score are the result"
    parser.add_argument("--runs", type=whole_number, default=10, help=text)
    text = "runs that train at a time (default: 1: each starts after the one before)"
    parser.add_argument("--parallel", type=whole_number, default=1, help=text)
    text = "apply the FluxTrainings with kubectl instead of printing them"
    parser.add_argument("--apply", action="store_true", help=text)
    text = "with status: the FluxTrainings with these labels, such as campaign=NAME (needs kubectl)"
    parser.add_argument("--selector", help=text)
    parser.add_argument("--namespace", help="namespace of the FluxTrainings (default: kubectl's)")
    add_ruleset(parser)


def run_campaign(arguments: argparse.Namespace) -> int:
    """Print or apply the campaign's jobs, or print its status; return 0."""
    given = {*arguments.given, *(["apply"] if arguments.apply else [])}
    is_status = arguments.file == _STATUS
    for name in ("runs", "parallel", "apply") if is_status else ("selector", "ruleset"):
        if name in given:
            text = f"is an option of campaign {'FILE' if is_status else _STATUS}"
            raise ConfigError(f"--{name}", UNSET, text)
    if is_status:
        return _status(arguments)
    if arguments.paths:
        text = "give one FILE, or the word status first"
        raise ConfigError("arguments", str(arguments.file), text)
    from fluxtrain.contract.resource.document import load_job, parse_yaml, read_text
    from fluxtrain.mlperf.campaign import LABEL, campaign_jobs

    load_job(arguments.file)
    file = parse_yaml(read_text(arguments.file), str(arguments.file))
    jobs = campaign_jobs(file, arguments.runs, arguments.parallel)
    if not arguments.apply:
        yaml.safe_dump_all(jobs, sys.stdout, sort_keys=False)
        return EXIT_OK
    from fluxtrain.mlperf.jobs import kubectl

    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": jobs})
    print(kubectl(arguments.namespace, "apply", "--filename=-", stdin=manifest), end="")
    label = f"{LABEL}={file['metadata']['name']}"
    namespace = arguments.namespace or file["metadata"].get("namespace")
    option = f" --namespace {namespace}" if namespace else ""
    print(f"fluxtrain mlperf campaign status --selector {label}{option}")
    return EXIT_OK


def _status(arguments: argparse.Namespace) -> int:
    from fluxtrain.mlperf.campaign import report, runs_of, runs_of_jobs
    from fluxtrain.mlperf.compliance import require_ruleset, sanitize
    from fluxtrain.mlperf.review.tree import find

    require_ruleset(arguments.ruleset)
    if bool(arguments.paths) == (arguments.selector is not None):
        raise ConfigError("PATH ...", len(arguments.paths), "give either paths or --selector")
    if arguments.selector is not None:
        with tempfile.TemporaryDirectory() as folder:
            runs = runs_of_jobs(arguments.selector, arguments.namespace, Path(folder))
            print(report(runs, arguments.ruleset))
        return EXIT_OK
    _require_once(arguments.paths)
    tree = find(arguments.paths)
    several = len(tree.places) > 1
    for place in tree.places:
        if several:
            print(f"{sanitize(place.name or 'the logs', _MOST)}:")
        runs = runs_of([*place.logs.values()])
        print(report(runs, arguments.ruleset), end="\n\n" if several else "\n")
    if others := tree.describe_others():
        print(others)
    return EXIT_OK


def _require_once(paths: Sequence[Path]) -> None:
    """Raise ConfigError for a path with a run that one before it has."""
    from fluxtrain.mlperf.review.tree import find

    known = set[Path]()
    for given in paths:
        logs = {log.resolve() for place in find([given]).places for log in place.logs.values()}
        if logs & known:
            raise ConfigError("PATH", str(given), "is given twice; name each run once")
        known |= logs


def add_mlperf(parser: argparse.ArgumentParser) -> None:
    subcommands = parser.add_subparsers(dest="mlperf_command", required=True, metavar="COMMAND")
    text = "run MLCommons' compliance checker on a log"
    check = add_command(
        subcommands,
        "check",
        check_log,
        text,
        "MLCommons' compliance checker, explained, and the rules beyond it.",
    )
    check.add_argument("log", type=path, metavar="LOG", help="mlperf.log of a run")
    check.add_argument("--json", action="store_true", help="print JSON, as review does")
    add_ruleset(check)
    add_review(subcommands)
    add_verify(subcommands)
    add_campaign(subcommands)
    add_package(subcommands)


def check_log(arguments: argparse.Namespace) -> int:
    """Print both results; return 0 only if the checker reports SUCCESS and no rule finds anything."""
    from fluxtrain.mlperf import check, render
    from fluxtrain.mlperf.compliance import describe_fit, require_readable, require_ruleset
    from fluxtrain.mlperf.review import review as rules
    from fluxtrain.mlperf.review.tree import dated, find, fit_of, read_results
    from fluxtrain.mlperf.review.verdict import judge

    require_ruleset(arguments.ruleset)

    require_readable(arguments.log)
    if arguments.json:
        tree = find([arguments.log])
        return _print_json(judge(tree.places, arguments.ruleset), tree)
    (read,) = read_results([arguments.log], arguments.ruleset)
    result = check(arguments.log, read.ruleset)
    print(render(result))
    if arguments.ruleset is None:
        print(f"ruleset {read.ruleset}: {describe_fit(fit_of(read), result.success, dated(read))}")
    found = list(rules.rule_findings(read.runs[0]))
    findings = rules.of_kind(found, "finding")
    if findings:
        print(f"review: {counted(rules.number_of(findings), 'finding')}")
        print(rules.render(findings))
    _print_notes(rules.of_kind(found, "note"))
    return EXIT_OK if result.success and not findings else EXIT_ERROR


def _print_json(verdicts: Sequence[Verdict], tree: Tree) -> int:
    from fluxtrain.mlperf.review.verdict import told

    print(json.dumps(told(verdicts, tree), indent=1))
    return EXIT_ERROR if any(each.findings for each in verdicts) else EXIT_OK


def _print_notes(notes: Sequence[Finding]) -> None:
    from fluxtrain.mlperf.review.review import number_of, render

    if notes:
        print(f"{counted(number_of(notes), 'note')}, no faults, but what a reviewer asks about:")
        print(render(notes))


def add_package(subcommands: Commands) -> None:
    text = "create and check a submission from ten runs"
    package = add_command(
        subcommands,
        "package",
        make_package,
        text,
        "Create an MLCommons submission from ten finished runs.",
    )
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
    add_ruleset(package, "6.1.0")


def add_ruleset(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add ``--ruleset``; without a default it is the one that the logs fit."""
    text = f"5.1.0, 6.0.0 or 6.1.0 (default: {default or 'that of the logs'})"
    parser.add_argument("--ruleset", default=default, help=text)


def make_package(arguments: argparse.Namespace) -> int:
    """Write the package and print the result of each tool; return 0 only if all of them pass."""
    from fluxtrain.mlperf.compliance import require_ruleset

    require_ruleset(arguments.ruleset)
    if bool(arguments.runs) == (arguments.selector is not None):
        text = "give either output folders or --selector"
        raise ConfigError("RUN ...", len(arguments.runs), text)
    from fluxtrain.mlperf.evidence import parse_failed

    failed = parse_failed(arguments.failed)
    if arguments.selector is None:
        return _package(arguments, arguments.runs, failed)
    from fluxtrain.mlperf.campaign import collect

    with tempfile.TemporaryDirectory() as folder:
        found = collect(arguments.selector, arguments.namespace, Path(folder))
        return _package(arguments, found.folders, [*found.failed, *failed])


def _package(
    arguments: argparse.Namespace, folders: Sequence[Path], failed: Sequence[FailedRun]
) -> int:
    from fluxtrain.mlperf import compliance, evidence, implementation, rcp
    from fluxtrain.mlperf.compliance import sanitize
    from fluxtrain.mlperf.review import package, review

    waivers = review.parse(arguments.waive)
    allowed = "must be FIELD=REASON, such as model=a smaller one"
    reasons = evidence.named_texts("--reason", arguments.reason, allowed)
    all_runs = runs = [evidence.read_finished_run(folder) for folder in folders]
    if len(runs) > rcp.NUM_RUNS:
        runs = rcp.median_window(runs)
        window = f"{runs[0].name} to {runs[-1].name}"
        print(f"the median of the windows of {rcp.NUM_RUNS} runs: {window}")
    for lost in failed:
        print(f"failed, which stays in the record: {sanitize(f'{lost.name}: {lost.reason}')}")
    result = evidence.Result("", runs, ruleset=arguments.ruleset, failed=failed)
    package.require_one_result(all_runs, result, waivers)
    differences = implementation.run_deviations(runs[0], reasons)
    closed, given = runs[0].closed, arguments.image
    if given is None:
        given = implementation.fetched_image(runs)
    image = implementation.find_image(given, implementation.ran_software(runs), closed)
    known = package.known_fields(runs)
    allowed = "must be FIELD=TEXT, such as cooling=liquid"
    answers: dict[str, object] = {
        **evidence.named_texts("--answer", arguments.answer, allowed, may_be_empty=True)
    }
    if arguments.system.exists():
        answers = {**package.read_answers(arguments.system), **answers}
    elif not package.is_complete({**known, **answers}):
        write_text(arguments.system, package.template(known))
        text = "created as a template: replace its nulls"
        raise ConfigError("--system", str(arguments.system), text)
    description = package.describe(known, answers)
    others = [run for run in all_runs if all(run is not each for each in runs)]
    statements = implementation.Statements(waivers, reasons, image, others, failed)
    organisation, name = package.write_package(runs, description, arguments.output, statements)
    print(f"package: {organisation}")
    checked = []
    for tool in compliance.check_package(organisation, name, arguments.ruleset, closed):
        print(f"  {tool.tool:<20} {'passed' if tool.passed else 'FAILED'}", flush=True)
        for message in () if tool.passed else tool.messages:
            print(f"    {message}")
        checked.append(tool)
    scaling = 1.0
    if closed:
        size, samples = runs[0].number("global_batch_size") or 0, [run.samples for run in runs]
        compared = rcp.compare_with_reference(samples, size, arguments.ruleset)
        print(f"convergence: {rcp.explain(compared, size, arguments.ruleset)}")
        scaling = compared.scaling_factor
    minutes = rcp.score([run.minutes for run in runs], scaling)
    each = ", ".join(f"{run.minutes:.2f}" for run in runs)
    print(f"score: {minutes:.2f} minutes, without the fastest and the slowest of {each}")
    print(f"deviations from the reference: {implementation.summary(differences)}")
    reviewed = _review(organisation / "results" / name / "flux1", checked, arguments.ruleset)
    return EXIT_OK if reviewed and all(tool.passed for tool in checked) else EXIT_ERROR


def _review(result: Path, checked: Sequence[ToolResult], ruleset: str) -> bool:
    """Print what the rules find in the packaged ``result``; return whether all of it is waived."""
    from fluxtrain.mlperf.review import review
    from fluxtrain.mlperf.review.tree import read_results

    (packaged,) = read_results([result], ruleset)
    found = [*review.all_rule_findings(packaged), *review.tool_findings(checked, str(result))]
    standing, waived = review.split(found, packaged)
    findings = review.of_kind(standing, "finding")
    verdict = "FAILED" if findings else "passed"
    number = counted(review.number_of(findings), "finding")
    print(f"review: {verdict}, {number}, {review.number_of(waived)} waived")
    if findings:
        print(review.render(findings))
    _print_notes(review.of_kind(standing, "note"))
    return not findings


def add_review(subcommands: Commands) -> None:
    text = "review logs, runs or a package by the rules' text"
    review = add_command(
        subcommands,
        "review",
        review_results,
        text,
        "The rules of the benchmark that MLCommons' tools do not check.",
    )
    text = (
        "repository of results, folder in it, log, output folder, quoted pattern; "
        "several runs are one result"
    )
    review.add_argument("paths", type=path, nargs="+", metavar="PATH", help=text)
    text = "write a page for a committee: all results, curves, findings"
    review.add_argument("--html", type=path, metavar="FILE", help=text)
    review.add_argument("--json", action="store_true", help="print JSON")
    add_ruleset(review)


def review_results(arguments: argparse.Namespace) -> int:
    """Print findings, notes and unknowns; return 0 only if there are no findings."""
    from fluxtrain.mlperf.compliance import require_ruleset
    from fluxtrain.mlperf.review.committee import write_page
    from fluxtrain.mlperf.review.tree import find
    from fluxtrain.mlperf.review.verdict import judge

    require_ruleset(arguments.ruleset)
    tree = find(arguments.paths)
    verdicts = judge(tree.places, arguments.ruleset)
    if arguments.html is not None:
        write_page(arguments.html, verdicts, tree.describe_others())
    if arguments.json:
        return _print_json(verdicts, tree)
    _print_verdicts(verdicts, tree.describe_others(), arguments.ruleset is None)
    return EXIT_ERROR if any(each.findings for each in verdicts) else EXIT_OK


def _print_verdicts(verdicts: Sequence[Verdict], left_out: str, inferred: bool) -> None:
    from fluxtrain.mlperf.review import review
    from fluxtrain.mlperf.review.verdict import headline, table

    several = len(verdicts) > 1
    print(headline(verdicts))
    if left_out:
        print(left_out)
    if several:
        print(f"{table(verdicts)}\n")
    for each in verdicts:
        if several or each.in_package:
            print(each.found)
        if each.findings:
            print(review.render(each.findings))
        _print_notes(each.notes)
        if each.waived:
            print(f"waived by the submitter: {counted(review.number_of(each.waived), 'finding')}")
            print(review.render(each.waived))
    if inferred:
        print(review.grouped({each.name: each.fits for each in verdicts if each.fits}))
    if unknown := [finding for each in verdicts for finding in each.unknowns]:
        print(review.render_unknowns(unknown))


def add_verify(subcommands: Commands) -> None:
    text = "verify a log by its chain of hashes"
    verify = add_command(
        subcommands,
        "verify",
        verify_chain,
        text,
        "Whether a log is what the run wrote, by the chain beside it.",
    )
    text = "output folder of a run, or its log with the chain beside it"
    verify.add_argument("run", type=path, metavar="RUN|LOG", help=text)
    text = "the job with its status, which has the heads that the operator saw; YAML or JSON"
    verify.add_argument("--status", type=path, metavar="JOB", help=text)
    text = "read all blocks of the checkpoints too, which takes minutes"
    verify.add_argument("--checkpoints", action="store_true", help=text)
    verify.add_argument("--json", action="store_true", help="print JSON")


def verify_chain(arguments: argparse.Namespace) -> int:
    """Print a line for each finding; return 0 without one, 1 with one."""
    from fluxtrain.contract.process import CHAIN_FILE, CONFIG_FILE, MLPERF_FILE
    from fluxtrain.mlperf.chain_verify import verify
    from fluxtrain.mlperf.evidence import read_bytes, read_object

    is_folder = arguments.run.is_dir()
    log = arguments.run / MLPERF_FILE if is_folder else arguments.run
    folder, content = log.parent, read_bytes(log)
    chain = folder / CHAIN_FILE
    if not chain.exists():
        raise ConfigError("RUN|LOG", str(folder), f"has no {CHAIN_FILE}")
    values = read_object(folder / CONFIG_FILE) if is_folder else None
    if is_folder and values is None:
        raise ConfigError("RUN|LOG", str(folder), f"has no {CONFIG_FILE}")
    verdict = verify(
        content,
        read_bytes(chain),
        None if arguments.status is None else _heads(arguments.status),
        None if values is None else (CONFIG_FILE, values),
        folder if is_folder else None,
        arguments.checkpoints,
    )
    print(json.dumps(asdict(verdict), indent=1) if arguments.json else _text(verdict))
    return EXIT_OK if verdict.holds else EXIT_ERROR


def _heads(file: Path) -> list[Head]:
    from fluxtrain.contract.resource.document import parse_yaml, read_text
    from fluxtrain.mlperf.chain_verify import read_heads

    job = parse_yaml(read_text(file), str(file))
    if not isinstance(job, dict):
        raise ConfigError("--status", UNSET, f"{file} is no FluxTraining")
    return read_heads(job)


def _text(verdict: ChainVerdict) -> str:
    lines = [f"found: {text}" for text in verdict.findings]
    lines += [f"note: {text}" for text in verdict.notes]
    shown = ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in verdict.result.items()
        if value is not None
    )
    lines += [f"result by the chain: {shown or 'none yet'}"]
    word = "VERIFIED" if verdict.holds else "FAILED"
    return "\n".join([*lines, f"{word}: {verdict.records} records, head {verdict.head}"])
