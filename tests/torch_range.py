"""Run the tests marked ``torch_range`` with other versions of torch, each in an environment of its own.

    python -m tests.torch_range 2.9.0 2.11 [--python 3.12] [pytest's own options]

With the oldest torch that pyproject allows come the oldest versions of all that it names, which tests' own
requirements allow; with others those of constraints.txt.
Environments are kept beside the programs of the cluster, outside the checkout, and all clones share them:
they have the project's requirements, not the project. The five used last remain. CUDA's libraries, two
thirds of an installation, are left out: torch loads a library whose functions all return an error instead,
and finds no GPU. A Python that the machine lacks comes from Debian's packages, unpacked there too, and runs
with their own libc; compilers are the machine's. Ends with a table; the exit code is 1 if a test failed or
was skipped.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cluster.commands import run
from cluster.console import timed
from cluster.errors import ClusterError, MachineError
from cluster.layout import CACHE
from cluster.programs import packages
from cluster.programs.packages import program
from supply_chain.locks import UV
from supply_chain.tool import installed
from tests.paths import ROOT
from tests.run import Result, read

KEPT = CACHE / "torch"
MOST_KEPT = 5
MARK = "torch_range"
ENV_OTHER_PYTHON = "FLUXTRAIN_OTHER_PYTHON"
"""The Python with the torch of the checkout's own environment, for tests/checkpoint_exchange.py."""

_EXTRAS = ("trainer", "mlperf", "demo", "test")
_OF_TORCH = re.compile(r"(torch|triton|nvidia-|cuda-)")
"""Lines of constraints.txt that hold for one version of torch only; those but torch are for GPUs."""
_SYSTEM = re.compile(r"(GLIBC|CXXABI|GCC|GOMP|OMP|GOACC|LIBC)")
"""Versions of symbols that are not CUDA's."""
_INSTALL_SECONDS = 3600
SUITES = ("testing", "unstable")
"""Debian's, in the order in which a Python is looked for."""


def environment(version: str, python: str) -> Path:
    """Return the environment of torch ``version``, such as 2.10 or 2.9.0, and ``python``; made if missing.

    Raises MachineError if the Python is not there, ClusterError if an installation fails.
    """
    interpreter = find_python(python)
    requirements, constraints = _requirements(version)
    key = hashlib.sha256("\n".join([*requirements, *constraints]).encode()).hexdigest()[:12]
    [release] = run([interpreter, "-c", "import platform as p; print(p.python_version())"]).split()
    folder = KEPT / f"torch-{version}-python-{release}-{key}"
    if not folder.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with timed(f"made {folder}"), TemporaryDirectory(dir=KEPT) as temporary:
            made = Path(temporary) / "environment"
            _install(made, version, interpreter, requirements, constraints)
            made.rename(folder)  # so it is complete, or not there
    os.utime(folder)
    forget_oldest()
    return folder


def forget_oldest() -> None:
    """Remove all environments but those used last."""
    for old in sorted(KEPT.glob("torch-*"), key=lambda path: -path.stat().st_mtime)[MOST_KEPT:]:
        with TemporaryDirectory(dir=KEPT) as temporary:  # never half an environment by that name
            old.rename(Path(temporary) / "old")


def find_python(python: str) -> Path:
    """Return the program of ``python``, a version or a path; Debian's if the machine has no such version.

    Raises MachineError if there is none that runs.
    """
    try:
        return Path(_uv("python", "find", "--system", "--no-python-downloads", python).strip())
    except ClusterError as error:
        reason = next((line for line in str(error).splitlines() if line.startswith("error:")), "")
        problem = f"PYTHON={python}: there is none that runs ({reason.removeprefix('error: ')})"
    if not re.fullmatch(r"\d+\.\d+", python):
        raise MachineError(f"{problem}; give a version such as 3.14, or the path of another")
    root = KEPT / f"python-{python}"
    if not root.exists():
        if os.geteuid():
            raise MachineError(f"{problem}; install it, or run as root: Debian's is unpacked then")
        packages.ensure_programs({"debootstrap": "debootstrap"})
        KEPT.mkdir(parents=True, exist_ok=True)
        with timed(f"made {root}"), TemporaryDirectory(dir=KEPT) as temporary:
            try:
                made = _unpack(Path(temporary), python)
            except ClusterError as error:
                message = f"{problem}; Debian's is not to be had: {str(error).splitlines()[-1]}"
                raise MachineError(message) from None
            _use_own_libraries(made, root, python)
            made.rename(root)
    return root / "usr" / "bin" / f"python{python}"


def _unpack(folder: Path, python: str) -> Path:
    """Return the root, in ``folder``, of the unpacked packages of ``python`` and of all that they need."""
    include = f"--include=python{python},libpython{python}-dev"
    options = ["--download-only", "--force-check-gpg", "--variant=minbase", include]
    downloaded, root = folder / "downloaded", folder / "root"
    debootstrap = [program("debootstrap"), *options]
    environment = {"PATH": packages.search_path()}
    for suite in SUITES:
        try:
            run([*debootstrap, suite, downloaded], env=environment, seconds=_INSTALL_SECONDS)
            break
        except ClusterError as error:
            if suite == SUITES[-1] or "Couldn't find these debs" not in str(error):
                raise
    for package in sorted(downloaded.glob("var/cache/apt/archives/*.deb")):
        run([program("dpkg-deb"), "--extract", package, root])
    return root


def _use_own_libraries(made: Path, root: Path, python: str) -> None:
    """Put a script in the program's place in ``made``, which will be ``root``: it calls that root's loader.

    The program takes the script, or a link to it, for itself: so environments and children work.
    """
    [loader] = made.glob("usr/lib/*-linux-gnu*/ld-linux-*.so.*")
    moved = Path("usr", "libexec", f"python{python}")
    script = made / "usr" / "bin" / f"python{python}"
    (made / moved).parent.mkdir(exist_ok=True)
    script.rename(made / moved)
    loader = root / loader.relative_to(made)
    own = shlex.join([str(loader), "--library-path", str(loader.parent)])
    script.write_text(f'#!/bin/sh\nexec {own} --argv0 "$0" {shlex.quote(str(root / moved))} "$@"\n')
    script.chmod(0o755)
    # pyconfig.h includes its part for the processor from /usr/include, where the machine has its own libc's
    headers = made / "usr" / "include" / f"python{python}"
    (headers / loader.parent.name).symlink_to(Path("..", loader.parent.name))


def _requirements(version: str) -> tuple[list[str], list[str]]:
    """Return the project's requirements and constraints without those of torch and its libraries.

    There are no constraints with the oldest ``version`` of torch.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(line for name in _EXTRAS for line in extras[name])]
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    [oldest] = (line.removeprefix("torch>=") for line in requirements if line.startswith("torch>="))
    if f"{version}.".startswith(f"{oldest}."):
        constraints = []
    return (
        [line for line in requirements if not line.startswith("torch>")],
        [line for line in constraints if not _OF_TORCH.match(line)],
    )


def _install(
    made: Path,
    version: str,
    interpreter: Path,
    requirements: Sequence[str],
    constraints: Sequence[str],
) -> None:
    """Make the environment ``made``: torch without CUDA's libraries, then all else that fits it."""
    _uv("venv", "--quiet", "--python", str(interpreter), str(made))
    install = ["pip", "install", "--quiet", "--compile-bytecode", f"--python={made}/bin/python"]
    _uv(*install, "--no-deps", "--no-cache", f"torch=={version}.*")
    [metadata] = made.glob("lib/*/site-packages/torch-*.dist-info/METADATA")
    of_gpus = re.findall(r"^Requires-Dist: ([\w.-]+)", metadata.read_text(), re.MULTILINE)
    texts = {
        "requirement": [*requirements, "torch"],
        "constraint": constraints,
        "override": [
            f"{name}; sys_platform == 'none'"
            for name in of_gpus
            if _OF_TORCH.match(name) and name != "triton"  # kernels are compiled without a GPU
        ],
    }
    for name, lines in texts.items():
        path = made / f"{name}s.txt"
        path.write_text("\n".join(lines) + "\n")
        install += [f"--{name}={path}"]
    _uv(*install, *[] if constraints else ["--resolution=lowest-direct"])
    stand_in_for_cuda(metadata.parents[1] / "torch" / "lib")


def _uv(*arguments: str) -> str:
    """Run uv, with a cache whose files the environments share by hard links."""
    uv = installed(UV) / "uv"
    return run([uv, f"--cache-dir={KEPT}/cache", *arguments], seconds=_INSTALL_SECONDS)


def stand_in_for_cuda(folder: Path) -> None:
    """Put one library, by all missing names, beside torch's in ``folder``: its functions return an error.

    Does nothing if none is missing, as in a wheel for CPUs.
    """
    libraries = list(folder.glob("*.so*"))
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", run([program("readelf"), "-d", *libraries])))
    missing = [name for name in sorted(needed - {path.name for path in libraries}) if _fails(name)]
    if not missing:
        return
    symbols = _missing_symbols(libraries)
    source = "int fail(void) { return 100; }\n" + "".join(
        f'int {name}(void) __attribute__((alias("fail")));\n'
        for names in symbols.values()
        for name in names
    )
    with TemporaryDirectory() as temporary:
        versions = Path(temporary) / "versions"
        versions.write_text(
            "".join(f"{key} {{ {'; '.join(names)}; }};\n" for key, names in symbols.items() if key)
        )
        options = ["-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,--version-script={versions}"]
        output = folder / missing[0]
        run([program("gcc"), *options, "-o", output, "-x", "c", "-"], stdin=source)
    for name in missing[1:]:
        (folder / name).symlink_to(missing[0])


def _fails(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return True
    return False


def _missing_symbols(libraries: Sequence[Path]) -> dict[str, set[str]]:
    """Return the functions by version, "" for none, that neither ``libraries`` nor the system define."""
    lines = run([program("nm"), "--dynamic", "--format=posix", *libraries]).splitlines()
    symbols = [line.split()[:2] for line in lines if not line.endswith(":")]
    defined = {name.split("@")[0] for name, kind in symbols if kind not in "Uw"}
    system = [ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")]
    missing = defaultdict[str, set[str]](set)
    for name, _, version in (name.partition("@") for name, kind in symbols if kind == "U"):
        if name in defined or _SYSTEM.match(version):
            continue
        if version or not any(hasattr(library, name) for library in system):
            missing[version].add(name)
    return missing


def run_tests(folder: Path, options: Sequence[str]) -> tuple[Result, float]:
    """Run the marked tests in the environment ``folder``; return what pytest reports, and the seconds.

    A failed test runs once more, by itself: some start processes with deadlines.
    """
    begin, result = time.monotonic(), Result(0)
    files = sorted(ROOT.glob("tests/**/*.py"))
    marked = [path for path in files if f"pytest.mark.{MARK}" in path.read_text()]
    path = os.pathsep.join(str(ROOT / name) for name in ("trainer", "operator", "."))
    variables = {"PYTHONPATH": path, ENV_OTHER_PYTHON: sys.executable}
    with TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [
            *(
                folder / "bin" / "python",
                "-m",
                "pytest",
                "-q",
                "-o",
                f"cache_dir={temporary}/cache",
            ),
            *(
                "--durations=10",
                "--numprocesses=2",
                "-m",
                MARK,
                f"--junitxml={report}",
                *options,
                *marked,
            ),
        ]
        alone = ["--numprocesses=0", "--last-failed", "--last-failed-no-failures=none"]
        for again in ([], alone):
            result.exit_code = subprocess.run(
                [*command, *again], cwd=ROOT, env={**os.environ, **variables}
            ).returncode
            if report.exists():
                read(report, result)
            if result.exit_code != pytest.ExitCode.TESTS_FAILED:
                break
    return result, time.monotonic() - begin


def versions_of(folder: Path) -> tuple[str, str]:
    """Return the versions of torch and Python of the environment ``folder``."""
    script = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"
    torch, python = json.loads(run([folder / "bin" / "python", "-c", script]))
    return torch, python


def main(arguments: Sequence[str]) -> int:
    """Run the tests with each version; return 0 if all passed."""
    parser = argparse.ArgumentParser("python -m tests.torch_range")
    parser.add_argument("torch", nargs="+", help="such as 2.10, for its newest, or 2.9.0")
    parser.add_argument(
        "--python", default=sys.executable, help="such as 3.12, which Debian may have, or a path"
    )
    given, options = parser.parse_known_args(arguments)
    rows, is_good = [("torch", "Python", "tests", "passed", "seconds")], True
    try:
        for version in given.torch:
            folder = environment(version, given.python)
            result, seconds = run_tests(folder, options)
            counts = Counter(result.outcomes.values())
            row = (str(counts.total()), str(counts["passed"]), f"{seconds:.0f}")
            rows.append((*versions_of(folder), *row))
            is_good &= result.exit_code == 0 and counts.total() == counts["passed"] > 0
    except ClusterError as error:
        print(f"test-torch: {error}", file=sys.stderr)
        return error.exit_code
    for row in rows:
        print(
            "  ".join(f"{cell:>{width}}" for cell, width in zip(row, (16, 8, 6, 7, 8), strict=True))
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
