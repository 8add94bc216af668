"""The pages' commands are ones that the command line accepts, and the submission's page has every step."""

from __future__ import annotations

import re
import shlex

import pytest
from tests.paths import ROOT

from fluxtrain.cli import _parser

PAGES = ("submission.md", "data.md")
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """Return the words of each ``fluxtrain`` command on the page, without comments."""
    text = (ROOT / "docs" / page).read_text()
    lines = [line for block in _BLOCK.findall(text) for line in block.splitlines()]
    found = [line.removeprefix("$ ") for line in lines if line.startswith("$ fluxtrain ")]
    return [shlex.split(line, comments=True)[1:] for line in found]


@pytest.mark.parametrize(
    "words", [words for page in PAGES for words in commands(page)], ids=" ".join
)
def test_a_command_of_a_page_is_accepted(words: list[str]) -> None:
    parsed, rest = _parser().parse_known_args(words)
    assert not rest or (parsed.takes_overrides and all(word.startswith("--") for word in rest))


def test_the_submissions_page_goes_from_the_data_to_the_review_in_order() -> None:
    steps = [" ".join(words[:2]) for words in commands("submission.md")]
    wanted = ["prepare download", "plan examples/mlperf-submission.yaml", "mlperf campaign"]
    wanted += ["mlperf package", "mlperf review"]
    places = [steps.index(step) for step in wanted]
    assert places == sorted(places)
    assert len(commands("data.md")) > 5
