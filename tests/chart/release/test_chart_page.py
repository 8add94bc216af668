"""What Artifact Hub shows of the chart: Chart.yaml, its annotations, the icon, and the table of values."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import yaml
from dashboards.chart_readme import documented
from tests.chart.objects import CHART
from tests.paths import ROOT

CHART_YAML = yaml.safe_load((CHART / "Chart.yaml").read_text())
NOTES = CHART_YAML["annotations"]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
HOME = "https://fluxtrain.dev"
SVG = "{http://www.w3.org/2000/svg}"


def leaves(value: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of each value that is no mapping with keys."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, *path, key)
    else:
        yield path


def test_every_value_has_a_row_of_its_own_or_of_what_it_is_part_of() -> None:
    rows = {row.key for row in documented()}
    for path in leaves(VALUES):
        names = {".".join(path[:length]) for length in range(1, len(path) + 1)}
        assert names & rows, ".".join(path)


def test_a_row_has_the_default_and_the_whole_comment() -> None:
    rows = {row.key: row for row in documented()}
    assert len(rows) == len(documented())
    assert rows["replicas"].default == "`2`"
    assert rows["replicas"].type == "int"
    assert rows["image.repository"].default == '`"fluxtrain/operator"`'
    assert rows["jobs.images"].default == '`["*"]`'
    assert rows["disruptionPercent"].description.endswith("8 pods per minute always may.")
    assert rows["securityContext"].default == "not set"
    assert rows["podDefaults.securityContext"].default == "not set"
    assert rows["podSecurityContext"].description.startswith("Security context of the operator's")


def test_the_page_has_the_fields_of_artifact_hub() -> None:
    assert CHART_YAML["home"] == HOME
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [person["name"] for person in CHART_YAML["maintainers"]] == [
        author["name"] for author in project["authors"]
    ]
    assert NOTES["artifacthub.io/license"] == project["license"]
    links = yaml.safe_load(NOTES["artifacthub.io/links"])
    assert {link["url"] for link in links} == set(project["urls"].values())


def test_the_images_of_the_page_are_the_default_ones() -> None:
    listed = {
        each["name"]: each["image"] for each in yaml.safe_load(NOTES["artifacthub.io/images"])
    }
    version = CHART_YAML["appVersion"]
    assert listed == {
        "operator": f"{VALUES['image']['repository']}:{version}",
        "trainer": f"{VALUES['trainerImage']['repository']}:{version}",
    }


def test_the_icon_is_a_picture_of_this_repository() -> None:
    """The home mirrors the repository's paths, as the links of the alerts have it too."""
    assert CHART_YAML["icon"].startswith(f"{HOME}/")
    picture = ElementTree.parse(ROOT / CHART_YAML["icon"].removeprefix(f"{HOME}/")).getroot()
    assert picture.tag == f"{SVG}svg"
    left, top, width, height = map(float, picture.attrib["viewBox"].split())
    assert (left, top) == (0, 0)
    assert width == height
    assert {node.tag for node in picture.iter()} <= {SVG + name for name in ("svg", "path", "rect")}
