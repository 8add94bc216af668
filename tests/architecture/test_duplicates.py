"""No code stands in two places: no run of twelve equal lines, and of six no more than size.toml allows."""

from __future__ import annotations

import pytest
from tests.architecture.duplicates import duplicates, of_the_project
from tests.architecture.size import SIZES

LONG, SHORT = 12, 6
ADVICE = "move it to one place that both import, or reword what is equal by chance"


def body(lines: int) -> str:
    return "".join(f"    total += {number}\n" for number in range(lines))


@pytest.mark.slow
def test_no_code_stands_in_two_places() -> None:
    runs = of_the_project(SHORT)
    long = [run for run in runs if run.lines >= LONG]
    assert not long, "\n".join([*map(str, long), ADVICE])
    allowed = SIZES["duplicates_of_six"]
    listed = "\n".join([*map(str, runs), f"size.toml allows {allowed}; {ADVICE}"])
    assert len(runs) <= allowed, listed


@pytest.mark.parametrize(
    "second",
    [
        f"def b():\n{body(12)}",
        f'"""Text."""\n\nimport os\nfrom a import (\n    c,\n)\n\ndef b():\n    """Add."""\n{body(12)}',
        f"class B:\n  def b():\n{body(12)}".replace("    ", "        "),
        "def b():\n" + body(12).replace("\n", "  # the why\n\n    # more\n"),
    ],
)
def test_a_run_is_found_whatever_does_not_count(second: str) -> None:
    (run,) = duplicates({"a.py": f"def a():\n{body(12)}", "b.py": second}, LONG)
    line = next(n for n, text in enumerate(second.splitlines(), 1) if "+= 0" in text)
    assert str(run) == f"a.py:2 and b.py:{line}: 12 equal lines"


def test_a_run_is_found_once_as_long_as_it_is_and_for_each_pair_of_places() -> None:
    source = f"def a():\n{body(20)}"
    runs = duplicates({"a.py": f"{source}{source}", "b.py": f"x = 1\n{source}"}, LONG)
    assert [run.lines for run in runs] == [21, 21, 21]


@pytest.mark.parametrize(
    "second",
    [
        body(11),
        body(12).replace("+= 5", "+= 55"),
        body(12).replace("+= 5", '+= "5"'),
        body(12).replace("total += 5", "sum += 5"),
    ],
)
def test_other_numbers_strings_and_names_are_other_code(second: str) -> None:
    assert not duplicates({"a.py": f"def a():\n{body(12)}", "b.py": f"def b():\n{second}"}, LONG)


def test_a_table_of_equal_lines_does_not_repeat_itself() -> None:
    assert not duplicates({"a.py": "x = [\n" + "    None,\n" * 12 + "]\n"}, LONG)
