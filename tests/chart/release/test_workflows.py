"""The workflows and the hooks of a host: they run targets of make, with least rights and pinned actions."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.paths import ROOT

from fluxtrain import __version__

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}")
USES = re.compile(r"uses: (\S+)(.*)")
RIGHTS = {
    "pypi": {"id-token": "write"},
    "chart": {"contents": "read", "packages": "write"},
    "image": {"contents": "read", "packages": "write"},
}
"""Of the jobs that publish; all others only read the repository."""


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(path.read_text())["jobs"]


def test_the_workflows_are_these() -> None:
    assert [path.stem for path in FILES] == ["check", "proof", "release", "test"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_command_is_a_target_of_make(path: Path) -> None:
    commands = [s["run"] for job in jobs(path).values() for s in job["steps"] if "run" in s]
    assert f"make {path.stem}" in commands
    for command in commands:
        program, target = command.split()  # no option, no second line, nothing of the event
        assert program == "make"
        assert target in TARGETS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_job_may_only_what_it_needs(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        assert job.get("permissions") == RIGHTS.get(name), name
        assert job["timeout-minutes"] > 0, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_actions_are_pinned_and_no_secret_is_named(path: Path) -> None:
    text = path.read_text()
    uses = USES.findall(text)
    assert uses
    for action, comment in uses:
        assert PINNED.fullmatch(action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
    assert "secrets." not in text
    assert "pull_request_target" not in text
    passwords = re.findall(r"(?:password|token): (.*?)[,}\n]", text.replace("}}", "))"))
    assert set(passwords) <= {'"${{ github.token ))"', "write"}


def test_only_a_tag_publishes() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert yaml.safe_load(text)[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads "on" so
    assert jobs(ROOT / ".github" / "workflows" / "release.yml")["pypi"]["environment"] == "pypi"


@pytest.mark.parametrize(("tag", "code"), [("", 0), (".1", 2), ("$(id)", 2), ('"; id #', 2)])
def test_a_tag_of_another_version_is_no_release(tag: str, code: int) -> None:
    """The tag is the environment's, as in the workflow: no shell and no make expands it."""
    tag = f"v{__version__}{tag}"
    done = subprocess.run(
        ["make", "--silent", "check-tag"],
        cwd=ROOT,
        env={**os.environ, "TAG": tag},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    said = f"tag: the tag {tag!r} is not v{__version__}, the version of pyproject.toml"
    assert not code or done.stderr.startswith(said)


def test_the_tag_is_compared_before_anything_is_made() -> None:
    first = next(s for s in jobs(FILES[2])["release"]["steps"] if "run" in s)
    assert first == {"run": "make check-tag", "env": {"TAG": "${{ github.ref_name }}"}}


def test_the_hooks_are_local_and_those_of_the_repository() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [source["repo"] for source in config["repos"]] == ["local"]
    entries = [hook["entry"] for hook in config["repos"][0]["hooks"]]
    assert entries[-1] == ".githooks/commit-msg"
    assert (ROOT / entries[-1]).is_file()
    assert [entry.split()[-1] for entry in entries[:-1]] == ["check-quick"]
    assert "check-quick" in TARGETS
