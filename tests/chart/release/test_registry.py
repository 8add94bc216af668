"""The chart of a release goes into a registry of OCI artifacts, and comes out of it the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.chart.objects import CHART, Program
from tests.chart.release.registry import ARCHIVE, VERSION, push_chart, serve


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    with serve("127.0.0.1", tmp_path) as address:
        yield address


@pytest.mark.slow
def test_the_chart_of_a_registry_is_the_released_one(
    helm: Program, registry: str, tmp_path: Path
) -> None:
    pushed = push_chart(registry, tmp_path)
    (tmp_path / "pulled").mkdir()
    address = f"oci://{registry}/charts/{CHART.name}"
    place = ("--version", VERSION, "--plain-http")
    pulled = helm("pull", address, *place, f"--destination={tmp_path}/pulled")
    assert digest_of(pushed) == digest_of(pulled.stdout + pulled.stderr)
    assert (tmp_path / "pulled" / ARCHIVE).read_bytes() == (tmp_path / ARCHIVE).read_bytes()

    def objects(chart: str | Path, *options: str) -> list[object]:
        text = helm("template", "x", chart, *options).stdout
        return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each and "kind" in each]

    from_registry = objects(address, *place)
    assert from_registry
    assert from_registry == objects(CHART)


def digest_of(output: str) -> str:
    """Return the digest that helm prints of an artifact."""
    return next(word for word in output.split() if word.startswith("sha256:"))
