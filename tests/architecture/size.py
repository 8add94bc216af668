"""Print how large the project is: files, lines, and how long its functions are."""

from __future__ import annotations

import ast
import statistics
import tomllib
from pathlib import Path
from typing import Any

from tests.paths import ROOT

PRODUCT = ("operator", "trainer")
SIZES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("size.toml").read_text("utf-8"))
"""The walls that tests of this folder hold."""
PARTS = (*PRODUCT, "cluster", "supply_chain", "tests", "benchmarks")


def modules(folder: Path) -> list[Path]:
    """Return the modules below ``folder``, those of hidden folders (environments) left out."""
    found = (path.relative_to(folder) for path in folder.rglob("*.py"))
    return sorted(folder / p for p in found if not any(part.startswith(".") for part in p.parts))


def function_lengths(tree: ast.AST) -> list[int]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        n.end_lineno - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, kinds) and n.end_lineno
    ]


def main() -> None:
    print(
        f"{'part':<12}{'files':>7}{'lines':>8}{'median file':>13}{'median function':>17}{'p90':>6}"
    )
    for part in PARTS:
        texts = [path.read_text() for path in modules(ROOT / part)]
        lines = [len(text.splitlines()) for text in texts if text.strip()]
        lengths = sorted(n for text in texts for n in function_lengths(ast.parse(text)))
        if not lengths:
            continue
        p90 = lengths[int(len(lengths) * 0.9)]
        print(
            f"{part:<12}{len(lines):>7}{sum(lines):>8}{statistics.median(lines):>13.0f}"
            f"{statistics.median(lengths):>17.0f}{p90:>6}"
        )


if __name__ == "__main__":
    main()
