"""The product reads and writes text in UTF-8, whatever the locale: each call says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.paths import ROOT

_TEXT = {"read_text": 1, "write_text": 2}
"""Functions that read or write text, and the arguments with which the encoding is given by its place."""


def calls_without_encoding(source: str) -> Iterator[str]:
    """Yield the calls that would use the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(key.arg == "encoding" for key in node.keywords):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        keys = {key.arg: key.value for key in node.keywords}
        if name in _TEXT and len(node.args) < _TEXT[name]:
            yield ast.unparse(node)
        elif name in ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile"):
            if _opens_text(node, keys):
                yield ast.unparse(node)
        elif isinstance(keys.get("text"), ast.Constant) and keys["text"].value is True:
            yield ast.unparse(node)


def _opens_text(node: ast.Call, keys: dict[str | None, ast.expr]) -> bool:
    is_builtin = isinstance(node.func, ast.Name)
    mode = keys.get("mode", node.args[is_builtin] if len(node.args) > is_builtin else None)
    if not isinstance(mode, ast.Constant) or not isinstance(mode.value, str):
        return is_builtin and mode is None
    return "b" not in mode.value and set(mode.value) <= set("rwxat+")


@pytest.mark.parametrize("folder", ["trainer", "operator"])
def test_every_text_file_has_an_encoding(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        found = list(calls_without_encoding(path.read_text(encoding="utf-8")))
        assert not found, f"{path}: give encoding='utf-8'"


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text, newline='')", True),
        ("path.open('w')", True),
        ("path.open(mode='a')", True),
        ("path.open('rb')", False),
        ("open(path)", True),
        ("open(path, 'r')", True),
        ("open(path, 'wb')", False),
        ("os.open(path, flags)", False),
        ("run(command, text=True)", True),
        ("web.Response(text='ok')", False),
    ],
)
def test_the_check_finds_what_it_should(source: str, is_found: bool) -> None:
    assert bool(list(calls_without_encoding(source))) == is_found
