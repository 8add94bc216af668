"""The Dockerfiles: what they copy exists, what they install is what pyproject says, torch is not in it."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections import deque
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "images").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MADE_BEFORE = {"dist"}  # pip wheel --wheel-dir dist
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Instruction = tuple[str, str]


def instructions(path: Path) -> list[Instruction]:
    """Return the instructions, with continued lines joined and remarks dropped."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    split = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(word, rest) for word, rest in split]


def values(path: Path, word: str) -> list[str]:
    return [rest for found, rest in instructions(path) if found == word]


def normal(requirement: str) -> str:
    found = NAME.match(requirement)
    assert found is not None, requirement
    return found[0].lower().replace("_", "-").replace(".", "-")


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_a_dockerfile_has_only_instructions_that_buildah_knows(path: Path) -> None:
    known = {
        "ARG",
        "FROM",
        "USER",
        "COPY",
        "RUN",
        "LABEL",
        "ENV",
        "WORKDIR",
        "EXPOSE",
        "ENTRYPOINT",
    }
    found = [word for word, _ in instructions(path)]
    assert set(found) <= known
    assert found[:2] == ["ARG", "FROM"]
    assert all(rest.split()[0] == "${BASE}" for rest in values(path, "FROM"))


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_everything_that_is_copied_is_in_the_context(path: Path) -> None:
    let_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")
    }
    for rest in values(path, "COPY"):
        words = shlex.split(rest)
        if words[0].startswith("--from="):
            continue
        for source in words[:-1]:
            assert source in let_in
            assert source in MADE_BEFORE or (ROOT / source).exists()


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_ends_as_an_ordinary_user_and_says_what_it_is(path: Path) -> None:
    assert values(path, "USER")[-1] == "1000:1000"
    labels = " ".join(values(path, "LABEL"))
    for key in ("title", "version", "revision"):
        assert f"org.opencontainers.image.{key}=" in labels
    assert f"VERSION={PROJECT['version']}" in values(path, "ARG")


def test_the_version_is_the_same_everywhere() -> None:
    chart = (ROOT / "charts" / "fluxtrain-operator" / "Chart.yaml").read_text()
    assert f"appVersion: {PROJECT['version']} " in chart
    for image in ("operator", "trainer"):
        deployment = (ROOT / "manifests" / "deployment.yaml").read_text()
        assert f"fluxtrain/{image}:{PROJECT['version']}\n" in deployment


def listed() -> set[str]:
    lines = (ROOT / "images" / "trainer-requirements.txt").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_the_trainers_image_gets_what_pyproject_asks_for_but_torch() -> None:
    wanted = {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["trainer"]}
    assert listed() == {line for line in wanted if normal(line) != "torch"}


def test_nothing_that_the_trainers_image_gets_asks_for_torch() -> None:
    """Otherwise pip could replace the base's torch for AMD GPUs by another one."""
    waiting, seen = deque(map(normal, listed())), set[str]()
    while waiting:
        name = waiting.popleft()
        if name in seen:
            continue
        seen.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # for another platform or Python
            continue
        waiting.extend(normal(line) for line in needed if "extra ==" not in line)
    assert len(seen) > len(listed())
    assert not {name for name in seen if name.startswith(("torch", "triton", "nvidia"))}


def test_the_operators_image_gets_no_torch() -> None:
    wanted = {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["operator"]}
    assert "torch" not in {normal(line) for line in wanted}
    assert "[operator]" in " ".join(values(ROOT / "images" / "operator.Dockerfile", "RUN"))
