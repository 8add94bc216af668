"""Find results and runs in what is named: a repository of several submitters, a folder in it, logs, a glob.

A division's folder may be above the organisation's. Code is below benchmarks/flux1/implementations, or
directly below benchmarks/flux1.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fluxtrain.contract.process import CONFIG_FILE, MLPERF_FILE
from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.compliance import best_fit, fit, sanitize
from fluxtrain.mlperf.evidence import (
    BENCHMARK,
    OTHERS_FOLDER,
    WAIVERS_FILE,
    Result,
    Run,
    is_file,
    read_failed,
    read_object,
    run_of,
)
from fluxtrain.mlperf.log_lines import month_of
from fluxtrain.runtime.progress import counted

OWN_CODE = "_fluxtrain"
"""With the name of the system before it: the folder of code that `fluxtrain mlperf package` writes."""
_RESULTS, _LOGS, _CODE = "results", "result_*.txt", "implementations"
_ABOVE = ("results/*", "*/results/*", "*/*/results/*")
"""Folders of systems below an organisation, below all of them, and below divisions."""
_ENDS = "_-."
_SUFFIXES = (".txt", ".log")
"""Of files that a pattern may mean: beside logs are others."""


@dataclass(frozen=True)
class Place:
    """Where one result is."""

    name: str
    logs: Mapping[str, Path]
    """By the names of the runs."""
    folder: Path | None = None
    """Of all of the logs, None if logs or output folders are named."""

    def read(self, ruleset: str | None = None) -> Result:
        """Return the result; without ``ruleset`` by the one that its logs fit best.

        Raises ConfigError for what cannot be read, and a log of another benchmark.
        """
        if self.folder is None:
            runs = [run_of(log, log.parent / CONFIG_FILE, name) for name, log in self.logs.items()]
            result = Result(self.name, runs)
        else:
            result = _result(self.folder, self.logs)
        return replace(result, ruleset=ruleset or best_fit(fit_of(result), dated(result)))


@dataclass(frozen=True)
class Tree:
    """What is in the paths that are named."""

    places: Sequence[Place]
    others: Mapping[str, int]
    """The results of each other benchmark."""

    def describe_others(self) -> str:
        """Return in words which results are left out, empty if none is."""
        shown = ", ".join(f"{sanitize(name)} {count}" for name, count in self.others.items())
        left = counted(sum(self.others.values()), "result")
        return f"left out: {left} of other benchmarks ({shown})" if shown else ""


def fit_of(result: Result) -> dict[str, list[str]]:
    """Return what each ruleset needs that the logs of ``result`` lack."""
    return fit(run.lines for run in result.runs)


def dated(result: Result) -> str:
    """Return the month of the logs of ``result``."""
    return month_of(run.lines for run in result.runs)


def read_results(paths: Sequence[Path], ruleset: str | None = None) -> list[Result]:
    """Return what `find` finds; ConfigError as from `find` and `Place.read`."""
    return [place.read(ruleset) for place in find(paths).places]


def find(paths: Iterable[Path]) -> Tree:
    """Return where results are in ``paths``, each once: named logs and output folders are runs of one.

    Raises ConfigError for a path in which there is none, nor a run, and if all are of other benchmarks.
    """
    runs, folders, others = dict[Path, tuple[str, Path]](), dict[Path, Path](), set[Path]()
    for path in _expanded(paths):
        logs = {str(log if is_file(path) else log.parent): log for log in _runs(path)}
        found, left = _folders(path)
        if not (found or left or logs):
            text = "no log, no output folder of fluxtrain run, and no package or result of flux1"
            raise ConfigError("PATH", str(path), text if path.exists() else "does not exist")
        for name, log in logs.items():
            runs.setdefault(log.resolve(), (name, log))
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
        others |= {folder.resolve() for folder in left}
    places = [*_places_of(runs, folders), *(map(_place, folders.values()))]
    tree = Tree(places, dict(sorted(Counter(folder.name for folder in others).items())))
    if not places:
        raise ConfigError("PATH", str(next(iter(paths))), f"{tree.describe_others()}; none is left")
    return tree


def describe(result: Result) -> str:
    """Return in words whose result it is, and what of it was found."""
    code = "none" if result.implementation is None else sanitize(result.implementation.name)
    description = "no" if result.description is None else "yes"
    logs = counted(len(result.runs), "log")
    return f"{'/'.join(whose(result))}: {logs}, description {description}, code {code}"


def whose(result: Result) -> tuple[str, str]:
    """Return organisation and system: of the folders, else of the first log."""
    if result.folder is not None:
        folder = result.folder.resolve()
        return sanitize(folder.parents[2].name), sanitize(folder.parent.name)
    first = result.runs[0] if result.runs else None
    keys = ("submission_org", "submission_platform")
    organisation, system = (sanitize(str((first and first.value(key)) or "-")) for key in keys)
    return organisation, system


def _expanded(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not glob.has_magic(str(path)) or path.exists():
            yield path
            continue
        matches = [Path(each) for each in sorted(glob.glob(str(path), recursive=True))]
        found = [each for each in matches if not is_file(each) or _is_log(each)]
        if not (kept := [each for each in found if any(_folders(each)) or _runs(each)]):
            raise ConfigError("PATH", str(path), "no log and no result has a name of this pattern")
        yield from kept


def _is_log(file: Path) -> bool:
    """Return whether a file that a pattern means may be a log, and not of another benchmark."""
    return file.suffix in _SUFFIXES and not _folders(file.parent)[1]


def _runs(path: Path) -> list[Path]:
    """Return the log that ``path`` is, that of an output folder, or of the output folders in it."""
    if is_file(path):
        return [path]
    own = path / MLPERF_FILE
    return [own] if is_file(own) else sorted(filter(is_file, path.glob(f"*/{MLPERF_FILE}")))


def _folders(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders with the logs of results, and those of other benchmarks."""
    whole = path.resolve()  # such as of "."
    in_results = len(whole.parents) > 1 and whole.parents[1].name == _RESULTS
    if next(path.glob(_LOGS), None) or in_results:
        other = in_results and whole.name != BENCHMARK
        return ([], [path]) if other else ([path], [])
    patterns = [f"{above}/*" for above in _ABOVE]
    if whole.name == _RESULTS:
        patterns.append("*/*")
    elif whole.parent.name == _RESULTS:
        patterns.append("*")
    elif whole.name != "benchmarks":
        patterns.append(BENCHMARK)
    below = [folder for pattern in patterns for folder in path.glob(pattern) if folder.is_dir()]
    below.sort()
    ours = [folder for folder in below if folder.name == BENCHMARK]
    return ours, [folder for folder in below if folder.name != BENCHMARK]


def _places_of(runs: Mapping[Path, tuple[str, Path]], folders: dict[Path, Path]) -> Iterator[Place]:
    """Yield the results of named logs; all logs of a benchmark's folder are the folder's result."""
    groups = dict[Path | None, dict[str, Path]]()
    for real, (name, log) in runs.items():
        if real.parent not in folders:
            folder = log.parent if real.parent.name == BENCHMARK else None
            groups.setdefault(folder, {})[name] = log
    for folder, logs in groups.items():
        if folder is not None and 1 < len(logs) == len(list(folder.glob(_LOGS))):
            folders.setdefault(folder.resolve(), folder)
        else:
            yield Place("" if folder is None else str(folder), logs)


def _place(folder: Path) -> Place:
    logs = sorted(folder.glob(_LOGS), key=lambda log: (len(log.name), log.name))
    return Place(str(folder), {log.name: log for log in logs}, folder)


def _result(folder: Path, logs: Mapping[str, Path]) -> Result:
    """Return the result whose logs are in ``folder``: ORGANISATION/results/SYSTEM/flux1."""
    whole = folder.resolve()
    if len(whole.parents) < 3:
        raise ConfigError("PATH", str(folder), "not in ORGANISATION/results/SYSTEM")
    system, organisation = whole.parent.name, whole.parents[2]
    code = _code(organisation, system)
    runs = [run_of(log, _config_of(log, code), name) for name, log in logs.items()]
    description = read_object(organisation / "systems" / f"{system}.json")
    waivers = read_object(code / WAIVERS_FILE) if code else None
    reasons = {rule: str(reason) for rule, reason in (waivers or {}).items()}
    inside = whole.name == BENCHMARK and whole.parents[1].name == _RESULTS
    result = Result(str(folder), runs, description, code, reasons, folder if inside else None)
    return (
        result if code is None else replace(result, others=_others(code), failed=read_failed(code))
    )


def _others(code: Path) -> list[Run]:
    logs = sorted((code / OTHERS_FOLDER).glob("run_*.txt"))
    return [run_of(log, None, f"{OTHERS_FOLDER}/{log.name}") for log in logs]


def _config_of(log: Path, code: Path | None) -> Path | None:
    """Return where `fluxtrain mlperf package` puts the configuration of result_N.txt."""
    number = log.stem.removeprefix("result_")
    return None if code is None else code / f"config_{number}.json"


def _code(organisation: Path, system: str) -> Path | None:
    """Return the code of ``system``: named after it, else what no system's name claims.

    A folder is that of the system with the longest name that it begins with, or that begins with it.
    """
    systems = {path.name for path in organisation.glob("results/*") if path.is_dir()}
    systems |= {path.stem for path in organisation.glob("systems/*.json")} | {system}
    benchmark = organisation / "benchmarks" / BENCHMARK
    for parent in (benchmark / _CODE, benchmark):
        folders = sorted(path for path in parent.glob("*") if path.is_dir() and path.name != _CODE)
        owners = {folder: _longest(folder.name, systems) for folder in folders}
        own = [folder for folder, owner in owners.items() if owner == system]
        if own:
            return min(own, key=lambda folder: _rank(folder.name, system))
        families = [folder for folder in folders if _is_part(folder.name, system)]
        if families:
            return max(families, key=lambda folder: len(folder.name))
        shared = [folder for folder, owner in owners.items() if owner is None]
        if len(shared) == 1:
            return shared[0]
    return benchmark if any(map(is_file, benchmark.glob("*"))) else None


def _is_part(short: str, name: str) -> bool:
    """Return whether ``name`` is ``short``, or goes on after it with a word of its own."""
    return name == short or (name.startswith(short) and name[len(short)] in _ENDS)


def _longest(folder: str, systems: Iterable[str]) -> str | None:
    return max((each for each in systems if _is_part(each, folder)), key=len, default=None)


def _rank(folder: str, system: str) -> tuple[bool, bool, bool, str]:
    own, same = folder == f"{system}{OWN_CODE}", folder == system
    return not own, not same, not folder.startswith(f"{system}_"), folder
