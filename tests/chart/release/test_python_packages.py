"""The wheel and the source distribution: their metadata, their files, and that one is made of the other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet
from supply_chain.locks import UV
from supply_chain.provenance import Build
from supply_chain.release import write_packages
from supply_chain.tool import installed
from tests.paths import EXAMPLES, ROOT
from tests.torch_range import KEPT

from fluxtrain import __version__

BUILD = Build("c" * 40, 1_700_000_000, "https://example.com/builder")
NAME = f"fluxtrain-{__version__}"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    names = [path.name for path in write_packages(ROOT, folder, BUILD)]
    assert names == [f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz"]
    return folder


@pytest.fixture(scope="module")
def metadata(packages: Path) -> Metadata:
    """Return the wheel's metadata; packaging raises for each field that the standards do not allow."""
    with zipfile.ZipFile(packages / f"{NAME}-py3-none-any.whl") as wheel:
        text = wheel.read(f"{NAME}.dist-info/METADATA")
    with tarfile.open(packages / f"{NAME}.tar.gz") as sources:
        file = sources.extractfile(f"{NAME}/PKG-INFO")
        assert file is not None
        assert file.read() == text
    return Metadata.from_email(text, validate=True)


def test_the_metadata_tells_what_an_index_shows(metadata: Metadata) -> None:
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]
    assert metadata.author == "fluxtrain contributors"
    assert metadata.author_email is None
    assert metadata.keywords
    assert metadata.project_urls is not None
    assert {"Homepage", "Documentation"} <= metadata.project_urls.keys()
    assert metadata.description_content_type == "text/markdown"


def test_the_classifiers_name_the_pythons_that_the_project_admits(metadata: Metadata) -> None:
    classifiers = metadata.classifiers or []
    prefix = "Programming Language :: Python :: "
    named = [line.removeprefix(prefix) for line in classifiers if line.startswith(prefix)]
    assert named == ["3", *PYTHONS]
    assert metadata.requires_python == SpecifierSet(f">={PYTHONS[0]}")
    assert not [line for line in classifiers if line.startswith("License ::")]  # PEP 639
    assert "Typing :: Typed" in classifiers


def test_the_packages_have_the_product_alone(packages: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "operator", "trainer"], cwd=ROOT, check=True, capture_output=True
    )
    product = set(tracked.stdout.decode().split())
    with tarfile.open(packages / f"{NAME}.tar.gz") as sources:
        names = {re.sub(r"^[^/]+/", "", name) for name in sources.getnames()}
    others = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore"}
    assert names == product | others
    with zipfile.ZipFile(packages / f"{NAME}-py3-none-any.whl") as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {name.split("/", 1)[1] for name in product}


def test_the_sources_give_the_same_wheel(packages: Path, tmp_path: Path) -> None:
    with tarfile.open(packages / f"{NAME}.tar.gz") as sources:
        sources.extractall(tmp_path, filter="data")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=tmp_path / NAME,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(BUILD.seconds)},
        check=True,
        capture_output=True,
    )
    wheel = f"{NAME}-py3-none-any.whl"
    assert (tmp_path / wheel).read_bytes() == (packages / wheel).read_bytes()


def test_each_extra_is_one_of_the_project(metadata: Metadata) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata.provides_extra == sorted(project["optional-dependencies"])


@pytest.mark.proof
@pytest.mark.slow
def test_the_wheel_of_an_index_trains_in_an_environment_of_its_own(
    packages: Path, tmp_path: Path
) -> None:
    """What its metadata require is at hand, as links; the index has the release, and no other is asked."""
    index, links, made = tmp_path / "index", tmp_path / "links", tmp_path / "environment"
    shutil.copytree(packages, index / "fluxtrain")
    links.mkdir()
    for place in Path(sysconfig.get_path("purelib")).iterdir():
        if place.suffix != ".pth" and "fluxtrain" not in place.name:
            (links / place.name).symlink_to(place)
    venv.create(made, with_pip=False)
    (site,) = made.glob("lib/python*/site-packages")
    (site / "links.pth").write_text(f"{links}\n")

    def run(program: str, *arguments: str | Path) -> str:
        variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        done = subprocess.run(
            [made / "bin" / program, *arguments],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    handler = partial(SimpleHTTPRequestHandler, directory=str(index))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        place = f"--index-url=http://127.0.0.1:{server.server_address[1]}/"
        run("python", "-m", "pip", "--isolated", "install", place, "fluxtrain[trainer,operator]")
        server.shutdown()
    assert run("python", "-c", "import fluxtrain; print(fluxtrain.__file__)").startswith(str(site))
    output = tmp_path / "run"
    run("fluxtrain", "run", EXAMPLES / "micro.yaml", "--output", output)
    steps = [
        json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(steps) == 100
    assert "kubectl fluxtrain" in run("kubectl-fluxtrain", "--help")


@pytest.mark.proof
def test_an_empty_environment_of_each_python_gets_wheels_alone() -> None:
    """What ``pip install 'fluxtrain[operator,trainer]'`` would install; nothing has to be compiled."""
    command = [installed(UV) / "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
    command += ["--only-binary=:all:", "--python-platform=x86_64-manylinux_2_28"]
    command += [f"--cache-dir={KEPT}/cache", "--extra=operator", "--extra=trainer"]

    def resolved(python: str) -> set[str]:
        arguments = [*command, f"--python-version={python}", "pyproject.toml"]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{python}: {done.stderr}"
        return {line.split("==")[0] for line in done.stdout.splitlines()}

    with ThreadPoolExecutor() as threads:  # they wait for the index
        for found in threads.map(resolved, PYTHONS):
            assert {"torch", "transformers", "pydantic", "kopf"} <= found
