"""Tests and benchmarks share code through modules of their own, not through test modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.paths import ROOT


def imported(path: Path) -> Iterator[str]:
    """Yield the full names of all modules and objects that ``path`` imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(folder: str) -> list[Path]:
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if ".peers" not in p.parts]


def is_test_module(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "tests" and any(part.startswith("test_") for part in parts)


@pytest.mark.parametrize("path", modules("tests"), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_imports_a_test_module(path: Path) -> None:
    assert [name for name in imported(path) if is_test_module(name)] == []


@pytest.mark.parametrize("path", modules("benchmarks"), ids=lambda p: p.name)
def test_no_benchmark_imports_tests(path: Path) -> None:
    assert [name for name in imported(path) if name.split(".")[0] == "tests"] == []
