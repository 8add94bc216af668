"""The pages' commands are ones that the command line accepts, and the submission's page has every step."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml
from tests.kubernetes_schemas import require_valid
from tests.paths import EXAMPLES, ROOT

from fluxtrain.cli.commands import make_parser
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.mlperf.review.review import RULES

PAGES = sorted(page.name for page in (ROOT / "docs").glob("*.md"))
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
    parsed, rest = make_parser().parse_known_args(words)
    assert not rest or (parsed.takes_overrides and all(word.startswith("--") for word in rest))


def test_the_submissions_page_goes_from_the_data_to_the_review_in_order() -> None:
    steps = [" ".join(words[:2]) for words in commands("submission.md")]
    wanted = ["plan examples/mlperf-submission.yaml", "mlperf campaign"]
    wanted += ["mlperf package", "mlperf review"]
    places = [steps.index(step) for step in wanted]
    assert places == sorted(places)
    assert len(commands("data.md")) > 5
    assert f"PASSED: {len(RULES)} rules, " in (ROOT / "docs/submission.md").read_text()


def test_the_volumes_and_the_downloads_of_the_submissions_page_are_valid() -> None:
    """They are what the example's jobs mount, at the paths of its preset."""
    (block,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/submission.md").read_text(), re.DOTALL
    )
    objects = list(yaml.safe_load_all(block))
    for each in objects:
        require_valid(each, "1.34.0")
    job = load_job(EXAMPLES / "mlperf-submission.yaml")
    claims = [each["metadata"]["name"] for each in objects[:2]]
    storage = job.spec.storage
    mounted = [
        volume.persistent_volume_claim for volume in (storage.data, storage.output) if volume
    ]
    assert claims == [claim.claim_name for claim in mounted if claim]
    (container,) = objects[2]["spec"]["template"]["spec"]["containers"]
    lines = [shlex.split(line) for line in container["args"][0].splitlines()]
    assert not any(make_parser().parse_known_args(words[1:])[1] for words in lines)
    data = resolve(job.spec.run).data
    wanted = [f"/data/{name}" for name in (data.train, data.validation, data.empty_encodings)]
    assert [words[-1] for words in lines] == wanted
