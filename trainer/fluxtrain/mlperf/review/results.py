"""The results in paths: logs and output folders are the runs of one, packages have several."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fluxtrain.contract.launch import CONFIG_FILE, MLPERF_FILE
from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.compliance import RULESETS
from fluxtrain.mlperf.evidence import (
    BENCHMARK,
    OTHERS_FOLDER,
    WAIVERS_FILE,
    Result,
    Run,
    is_file,
    read_object,
    run_of,
)
from fluxtrain.mlperf.failed_runs import read_failed


def read_results(paths: Sequence[Path], ruleset: str = RULESETS[-1]) -> list[Result]:
    """Return what ``paths`` hold: logs and output folders are the runs of one result, packages have several.

    Raises ConfigError for a path that is none of them.
    """
    results: list[Result] = []
    runs: list[Run] = []
    for path in paths:
        if is_file(path):
            runs.append(run_of(path, path.parent / CONFIG_FILE, str(path)))
        elif is_file(path / MLPERF_FILE):
            runs.append(run_of(path / MLPERF_FILE, path / CONFIG_FILE, str(path)))
        elif found := list(_results(path)):
            results += [replace(result, ruleset=ruleset) for result in found]
        else:
            text = "no log, no output folder of fluxtrain run, and no package or result of flux1"
            raise ConfigError("PATH", str(path), text)
    return [Result("", runs, ruleset=ruleset), *results] if runs else results


def _results(path: Path) -> Iterator[Result]:
    """Yield the results in an organisation's folder, a system's or a benchmark's."""
    if next(path.glob("result_*.txt"), None):
        folders: Iterable[Path] = [path]
    else:
        folders = [*path.glob(f"results/*/{BENCHMARK}"), *path.glob(BENCHMARK)]
    for folder in sorted(folders):
        yield _result(folder)


def _result(folder: Path) -> Result:
    """Return the result whose logs are in ``folder``: ORGANISATION/results/SYSTEM/flux1."""
    whole = folder.resolve()  # such as of "."
    if len(whole.parents) < 3:
        raise ConfigError("PATH", str(folder), "not in ORGANISATION/results/SYSTEM")
    system, organisation = whole.parent.name, whole.parents[2]
    implementation = _implementation(
        organisation / f"benchmarks/{BENCHMARK}/implementations", system
    )
    logs = sorted(folder.glob("result_*.txt"), key=lambda log: (len(log.name), log.name))
    runs = [run_of(log, _config_of(log, implementation)) for log in logs]
    description = read_object(organisation / "systems" / f"{system}.json")
    waivers = read_object(implementation / WAIVERS_FILE) if implementation else None
    reasons = {rule: str(reason) for rule, reason in (waivers or {}).items()}
    inside = whole.name == BENCHMARK and whole.parents[1].name == "results"
    place = folder if inside else None
    result = Result(str(folder), runs, description, implementation, reasons, place)
    if implementation is None:
        return result
    return replace(result, others=_others(implementation), failed=read_failed(implementation))


def _others(implementation: Path) -> list[Run]:
    logs = sorted((implementation / OTHERS_FOLDER).glob("run_*.txt"))
    return [run_of(log, None, f"{OTHERS_FOLDER}/{log.name}") for log in logs]


def _implementation(folder: Path, system: str) -> Path | None:
    """Return the code of ``system``: fluxtrain's, or one whose name begins with the system's."""
    if (own := folder / f"{system}_fluxtrain").is_dir():
        return own
    found = sorted(path for path in folder.glob(f"{glob.escape(system)}*") if path.is_dir())
    found.sort(key=lambda path: not path.name.startswith(f"{system}_"))
    return found[0] if found else None


def _config_of(log: Path, implementation: Path | None) -> Path | None:
    """Return where `fluxtrain mlperf package` puts the configuration of result_N.txt."""
    number = log.stem.removeprefix("result_")
    return None if implementation is None else implementation / f"config_{number}.json"
