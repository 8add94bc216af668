"""Find runs of equal lines in two places of trainer, operator, tests, benchmarks and cluster.

Comments, blank lines, docstrings and imports do not count; names, strings and numbers stay.

python -m tests.architecture.duplicates [LINES]    print all runs of at least so many lines, 12 by default
"""

from __future__ import annotations

import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from tests.architecture.size import modules
from tests.paths import ROOT

PARTS = ("trainer", "operator", "tests", "benchmarks", "cluster")
_LAYOUT = {tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_Place = tuple[str, int]
"""The path of a module, and a line of it."""


@dataclass(frozen=True, order=True)
class Duplicate:
    """A run of ``lines`` equal lines; it begins at ``first`` and at ``second``."""

    first: _Place
    second: _Place
    lines: int

    def __str__(self) -> str:
        (a, i), (b, j) = self.first, self.second
        return f"{a}:{i} and {b}:{j}: {self.lines} equal lines"


def normalised(source: str) -> list[tuple[int, str]]:
    """Return number and text of each line of ``source`` that counts, without indentation and comment."""
    lines = source.splitlines()
    numbers = list[int]()
    statement = list[tokenize.TokenInfo]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
        elif token.type != tokenize.NEWLINE:
            statement += [] if token.type in _LAYOUT else [token]
        else:
            is_docstring = all(each.type == tokenize.STRING for each in statement)
            if not is_docstring and statement[0].string not in ("import", "from"):
                numbers += range(statement[0].start[0], token.end[0] + 1)
            statement = []
    return [(number, text) for number in numbers if (text := lines[number - 1].strip())]


def duplicates(sources: Mapping[str, str], at_least: int) -> list[Duplicate]:
    """Return each run of ``at_least`` or more equal lines in two places of ``sources``, by path.

    A run does not overlap itself.
    """
    texts = {path: normalised(source) for path, source in sources.items()}
    places = defaultdict[tuple[str, ...], list[_Place]](list)
    for path, lines in texts.items():
        for start in range(len(lines) - at_least + 1):
            window = tuple(text for _, text in lines[start : start + at_least])
            places[window].append((path, start))
    return sorted(
        run
        for equal in places.values()
        for first, second in combinations(equal, 2)
        for run in _run(texts, first, second, at_least)
    )


def _run(
    texts: Mapping[str, list[tuple[int, str]]], first: _Place, second: _Place, at_least: int
) -> Iterator[Duplicate]:
    """Yield the run that begins at both places; none if it begins earlier, or is too short."""
    (a, i), (b, j) = first, second
    if i and j and texts[a][i - 1][1] == texts[b][j - 1][1]:
        return
    limit = j - i if a == b else len(texts[b])
    length = 0
    for (_, one), (_, other) in zip(texts[a][i:], texts[b][j:], strict=False):
        if one != other or length == limit:
            break
        length += 1
    if length >= at_least:
        yield Duplicate((a, texts[a][i][0]), (b, texts[b][j][0]), length)


def of_the_project(at_least: int) -> list[Duplicate]:
    """Return the runs of ``at_least`` or more lines in all parts."""
    paths = [path for part in PARTS for path in modules(ROOT / part)]
    return duplicates(
        {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}, at_least
    )


if __name__ == "__main__":
    for each in of_the_project(int(sys.argv[1]) if sys.argv[1:] else 12):
        print(each)
