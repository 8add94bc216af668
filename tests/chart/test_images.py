"""The Dockerfiles: their inputs exist, and they install what pyproject lists, but torch."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import deque
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from supply_chain.__main__ import main as supply_chain
from supply_chain.audit import advisories, coverage
from supply_chain.locks import EXTRAS, LOCKS, read_lock
from supply_chain.sbom import document, purl, write
from tests.paths import ROOT

IMAGES = sorted((ROOT / "images").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL = "dist/fluxtrain-${VERSION}-py3-none-any.whl"  # pip wheel --wheel-dir dist makes it
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Instruction = tuple[str, str]


def instructions(path: Path) -> list[Instruction]:
    """Return the instructions, with continued lines joined and without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    split = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(word, rest) for word, rest in split]


def values(path: Path, word: str) -> list[str]:
    return [rest for name, rest in instructions(path) if name == word]


def normal(requirement: str) -> str:
    match = NAME.match(requirement)
    assert match is not None, requirement
    return match[0].lower().replace("_", "-").replace(".", "-")


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_a_dockerfile_has_only_instructions_of_buildah(path: Path) -> None:
    known = "ARG FROM USER COPY RUN LABEL ENV WORKDIR EXPOSE ENTRYPOINT"
    words = [word for word, _ in instructions(path)]
    assert set(words) <= set(known.split())
    assert words[:2] == ["ARG", "FROM"]
    assert all(rest.split()[0] == "${BASE}" for rest in values(path, "FROM"))


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_all_copied_files_are_in_the_context(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    for rest in values(path, "COPY"):
        words = shlex.split(rest)
        if words[0].startswith("--from="):
            continue
        for source in words[:-1]:
            assert any(fnmatch(source, f"{pattern}*") for pattern in allowed), source
            assert source == WHEEL or any(ROOT.glob(source))


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_runs_as_an_ordinary_user_and_has_labels(path: Path) -> None:
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


def listed(image: str) -> set[str]:
    lines = (ROOT / "images" / f"{image}-requirements.txt").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_an_image_installs_what_pyproject_requires_but_torch(image: str) -> None:
    extras = [image, "mlperf"] if image == "trainer" else [image]
    required = {*PROJECT["dependencies"]}
    required |= {line for extra in extras for line in PROJECT["optional-dependencies"][extra]}
    assert listed(image) == {line for line in required if normal(line) != "torch"}
    path = ROOT / "images" / f"{image}.Dockerfile"
    copied = " ".join(values(path, "COPY")).split()
    assert any(fnmatch(f"images/{image}-requirements.lock", pattern) for pattern in copied)
    installs = next(run for run in values(path, "RUN") if f"/tmp/{image}-requirements.lock" in run)
    assert "--require-hashes" in installs


@pytest.mark.parametrize("name", EXTRAS)
def test_extra_packages_are_installed_by_locks_of_their_own(name: str) -> None:
    assert listed(name) == set(PROJECT["optional-dependencies"][name])
    runs = values(ROOT / "images" / "trainer.Dockerfile", "RUN")
    (extra,) = [run for run in runs if "${EXTRA_PACKAGES}" in run]
    assert "--require-hashes --requirement /tmp/${name}-requirements.lock" in extra


def test_compiled_code_of_the_operator_image_has_neither_times_nor_chance() -> None:
    """`make reproduce` builds it twice with buildah; this finds a change that forgets it."""
    for run in values(ROOT / "images" / "operator.Dockerfile", "RUN"):
        assert "--no-compile" in run
        assert "PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash" in run
    trainer = values(ROOT / "images" / "trainer.Dockerfile", "ARG")
    assert {"SOURCE_DATE_EPOCH=0", "PYTHONHASHSEED=0"} <= set(trainer)


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_no_installed_package_requires_torch(image: str) -> None:
    """Otherwise pip could replace the base image's torch for AMD GPUs."""
    waiting, seen = deque(map(normal, listed(image))), set[str]()
    while waiting:
        name = waiting.popleft()
        if name in seen:
            continue
        seen.add(name)
        try:
            requirements = requires(name) or []
        except PackageNotFoundError:  # for another platform or Python
            continue
        waiting.extend(normal(line) for line in requirements if "extra ==" not in line)
    assert len(seen) > len(listed(image))
    assert not {name for name in seen if name.startswith(("torch", "triton", "nvidia"))}


def test_the_operator_image_has_the_command_of_the_rendezvous_pod_on_its_path() -> None:
    path = ROOT / "images" / "operator.Dockerfile"
    assert "--target /opt/fluxtrain " in " ".join(values(path, "RUN"))
    assert "PATH=/opt/fluxtrain/bin:${PATH}" in " ".join(values(path, "ENV")).split()
    assert "fluxtrain" in PROJECT["scripts"]


@pytest.mark.parametrize("image", LOCKS)
def test_a_lock_has_all_that_is_installed_in_the_tested_versions_with_hashes(image: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    pinned = {normal(line): line.partition("==")[2] for line in lines}
    locked = {normal(package.name): package for package in read_lock(image)}
    assert {normal(line) for line in listed(image)} <= locked.keys()
    assert not {name for name in locked if name.startswith(("torch", "triton", "nvidia"))}
    for name, package in locked.items():
        assert package.hashes, name
        assert pinned.get(name, package.version) == package.version, name
        brought = name == "setuptools"  # by the environment itself, so that no pin is kept for it
        assert name in pinned or package.marker or brought, (
            f"{name} is for all platforms, but not in constraints.txt"
        )


def test_a_bill_of_materials_names_every_package_of_the_lock(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "1.0"), write(tmp_path / "b", "1.0")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    for image, path in zip(("operator", "trainer"), first, strict=True):
        bill = json.loads(path.read_text())
        assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
        parts = bill["components"]
        listed = {part["purl"] for part in parts if part.get("scope") != "optional"}
        assert len(listed) == len(read_lock(image)) + 1
        assert len({part["bom-ref"] for part in parts}) == len(parts)
        assert set(bill["dependencies"][0]["dependsOn"]) == listed


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_bill_of_materials_names_what_extra_packages_add(extra: str) -> None:
    parts = document("trainer", "1.0")["components"]
    by_purl = {part["purl"]: part for part in parts}
    installed = {purl(package) for package in read_lock("trainer")}
    for package in read_lock(extra):
        part = by_purl[purl(package)]
        (source,) = part["externalReferences"]
        if purl(package) in installed:
            assert "scope" not in part, "it is always installed"
            continue
        assert part["scope"] == "optional"
        assert {"name": "fluxtrain:extra-package", "value": extra} in part["properties"]
        assert [each["content"] for each in source["hashes"]] == list(package.hashes)


def test_advisories_are_read_and_no_answer_is_none() -> None:
    found = {"id": "CVE-1", "fix_versions": ["2.0"]}
    answer = {"dependencies": [{"name": "a", "version": "1.0", "vulns": [found]}, {"name": "b"}]}
    assert advisories(json.dumps(answer)) == ["a 1.0: CVE-1, mended in 2.0"]
    unknown = {"name": "c", "skip_reason": "not found"}
    known = coverage(json.dumps({"dependencies": [{"name": "b"}, unknown]}))
    assert known == "1 of 2 packages compared, the service does not know c"
    assert coverage(json.dumps({"dependencies": [unknown]})).startswith("nothing was compared")
    assert advisories("") is None
    assert advisories("[]") is None


@pytest.mark.slow
def test_two_builds_of_the_wheel_are_equal(tmp_path: Path) -> None:
    for name, umask in (("a", 0o022), ("b", 0o077)):
        copied = tmp_path / name / name  # another path, other modes and times
        previous = os.umask(umask)
        try:
            copied.mkdir(parents=True)
            for file in ("pyproject.toml", "README.md", "LICENSE"):
                (copied / file).write_bytes((ROOT / file).read_bytes())
            for folder in ("operator", "trainer"):
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(
                    ROOT / folder, copied / folder, ignore=ignored, copy_function=shutil.copyfile
                )
        finally:
            os.umask(previous)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
        command = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            "wheel",
            "-d",
            str(tmp_path / name),
        ]
        subprocess.run(command, cwd=copied, env=environment, check=True, capture_output=True)
    first, second = (next((tmp_path / name).glob("*.whl")) for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_the_lists_say_that_base_images_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert supply_chain("sbom", str(tmp_path)) == 0
    *paths, last = capsys.readouterr().out.splitlines()
    assert sorted(paths) == sorted(map(str, tmp_path.iterdir()))
    assert "base images are not listed: `syft IMAGE`" in last
    for path in tmp_path.iterdir():
        (note,) = json.loads(path.read_text())["metadata"]["properties"]
        assert note["name"] == "fluxtrain:base-image"
        assert note["value"].endswith("are not listed")
