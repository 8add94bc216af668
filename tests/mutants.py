"""Change the product code in 60 small ways, one at a time, and count how many changes the tests catch.

    python -m tests.mutants [--count 60] [--seed 1] [--only PREFIX]

The sample is spread evenly over the folders of both packages. Each change is made in a copy of the tree, and
the test files of its package run there until one fails, those that import the changed module first. Slow
tests are left out, and no cluster is started.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"fluxtrain": "trainer", "fluxtrain_operator": "operator"}
SUITES = ("contract", "operator", "trainer")
TIMEOUT_SECONDS = 420
NEAREST = 6  # test files that run first
OUTCOMES = {0: "passed", 1: "failed", 2: "failed"}  # 2: the changed module cannot be imported
WORDS = {"passed": "SURVIVED", "failed": "caught", "timeout": "TIMEOUT"}

_FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    path: Path
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def modules() -> dict[str, Path]:
    """Return every product module with its file, relative to the root."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path.relative_to(ROOT)
    return found


def sample(count: int, seed: int, only: str) -> list[Mutant]:
    """Return ``count`` mutants, taken in turn from the folders of both packages."""
    rng = random.Random(seed)
    by_folder = defaultdict(list)
    for module, path in modules().items():
        if module.startswith(only) and module.count(".") and path.name != "__main__.py":
            by_folder[path.parent].append((module, path))
    chosen: list[Mutant] = []
    folders = sorted(by_folder)
    while len(chosen) < count:
        folder = folders[len(chosen) % len(folders)]
        module, path = rng.choice(by_folder[folder])
        candidates = list(mutants(module, path))
        if candidates and (mutant := rng.choice(candidates)) not in chosen:
            chosen.append(mutant)
        elif not candidates:
            by_folder[folder].remove((module, path))
            folders = [each for each in folders if by_folder[each]]
    return chosen


def mutants(module: str, path: Path) -> Iterator[Mutant]:
    """Yield every mutant of one module; annotations and docstrings stay as they are."""
    text = (ROOT / path).read_text()
    tree = ast.parse(text)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    for replacement in changes(node):
                        yield from applied(module, path, text, node, replacement)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what ``node`` may be replaced by."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _FLIPPED:
        flipped = _FLIPPED[type(node.ops[0])]()
        yield ast.Compare(node.left, [flipped, *node.ops[1:]], node.comparators)  # type: ignore[list-item]
    elif isinstance(node, ast.BinOp) and type(node.op) in _FLIPPED and not _is_text(node):
        yield ast.BinOp(node.left, _FLIPPED[type(node.op)](), node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(_FLIPPED[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp):
        yield ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        yield ast.Constant(None)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def applied(
    module: str, path: Path, text: str, node: ast.AST, replacement: ast.AST
) -> Iterator[Mutant]:
    """Yield the mutant whose source has ``replacement`` in the place of ``node``."""
    if isinstance(node, ast.If | ast.IfExp):
        node = node.test
    if isinstance(node, ast.Return) and node.value is not None:
        node = node.value
    assert isinstance(node, ast.expr)
    before = ast.get_source_segment(text, node)
    if before is None or node.end_lineno is None or node.end_col_offset is None:
        return
    lines = text.encode().splitlines(keepends=True)
    offset = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    after = f"({ast.unparse(ast.fix_missing_locations(replacement))})"
    source = text.encode()[:offset] + after.encode() + text.encode()[end:]
    short = " ".join(before.split())
    yield Mutant(module, path, node.lineno, short[:70], after[:70], source.decode())


def test_files() -> dict[Path, str]:
    """Return the text of every test file that needs no cluster."""
    return {
        path.relative_to(ROOT): path.read_text()
        for suite in SUITES
        for path in sorted((ROOT / "tests" / suite).rglob("test_*.py"))
    }


def tests_of(mutant: Mutant, files: dict[Path, str]) -> list[str]:
    """Return the test files of its package, the most likely first: by import, then by name, by folder."""
    package, _, name = mutant.module.rpartition(".")
    imports = (
        f"from {mutant.module} import",
        f"from {package} import {name}",
        f"import {mutant.module}",
    )
    folder = set(mutant.path.parent.parts)

    def score(item: tuple[Path, str]) -> tuple[int, int, int]:
        path, text = item
        direct = any(phrase in text for phrase in imports)
        return (-direct, -(name in path.stem), -len(folder & set(path.parts)))

    own = "operator" if mutant.module.startswith("fluxtrain_operator") else "trainer"
    near = [item for item in files.items() if own in item[0].parts or "contract" in item[0].parts]
    return [str(path) for path, _ in sorted(near, key=score)]


def run_tests(copy: Path, files: list[str]) -> str:
    """Return whether ``files`` passed, failed or took too long in ``copy``; slow tests are left out.

    Raises RuntimeError if pytest could not run them.
    """
    environment = {**os.environ, "PYTHONPATH": f"{copy}/operator:{copy}/trainer"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout=120"]
    options += ["-m", "not slow and not proof"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode in OUTCOMES:
        return OUTCOMES[done.returncode]
    raise RuntimeError(
        f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    )


def outcome(mutant: Mutant, copy: Path, files: dict[Path, str]) -> str:
    """Return what the tests report with ``mutant`` in ``copy``: failed means that it is caught."""
    tests = tests_of(mutant, files)
    target = copy / mutant.path
    original = target.read_text()
    target.write_text(mutant.source)
    try:
        result = run_tests(copy, tests[:NEAREST])
        return run_tests(copy, tests[NEAREST:]) if result == "passed" else result
    finally:
        target.write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a package or module")
    arguments = parser.parse_args()
    chosen = sample(arguments.count, arguments.seed, arguments.only)
    files, outcomes = test_files(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(
            ".git", ".venv", "runs", ".cluster", ".*_cache", "__pycache__"
        )
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)

        @cache
        def passes(tests: tuple[str, ...]) -> bool:
            return run_tests(copy, list(tests)) == "passed"

        for number, mutant in enumerate(chosen, 1):
            begin = time.monotonic()
            result = outcome(mutant, copy, files)
            outcomes[result] += 1
            took = time.monotonic() - begin
            print(f"{number:3} {WORDS[result]:<8} {took:4.0f} s  {mutant}", flush=True)
            nearest = tuple(tests_of(mutant, files)[:NEAREST])
            if result == "failed" and not passes(nearest):
                sys.exit("the tests do not pass without the change, so they prove nothing")
    counts = ", ".join(f"{count} {WORDS[result]}" for result, count in sorted(outcomes.items()))
    print(f"{len(chosen)} changes: {counts}")


if __name__ == "__main__":
    main()
