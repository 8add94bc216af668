"""Tests and benchmarks share code through modules of their own, not through test modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT


def imported(folder: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield every module below ``folder`` and the parts of each full name that it imports."""
    for path in (ROOT / folder).rglob("*.py"):
        if ".peers" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.split(".")) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                module = node.module.split(".")
                yield from ((path, [*module, alias.name]) for alias in node.names)


def test_no_module_imports_a_test_module() -> None:
    for path, (package, *parts) in imported("tests"):
        assert package != "tests" or not any(part.startswith("test_") for part in parts), path


def test_no_benchmark_imports_tests() -> None:
    for path, (package, *_) in imported("benchmarks"):
        assert package != "tests", path
