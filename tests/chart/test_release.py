"""A release is signed, says what it was made of, and is refused when one byte of it is another."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from supply_chain.checksums import ReleaseError
from supply_chain.locks import LOCKS, read_lock
from supply_chain.provenance import Build
from supply_chain.release import build_of, sign_release, verify_release, write_release
from tests.paths import ROOT

from fluxtrain import __version__

BUILD = Build("c" * 40, 1_700_000_000, "https://example.com/builder")
WHEEL = f"fluxtrain-{__version__}-py3-none-any.whl"
SOURCES = f"fluxtrain-{__version__}.tar.gz"
CHART = f"fluxtrain-operator-{__version__}.tgz"
FILES = [
    *(WHEEL, SOURCES, CHART, f"operator-{__version__}.cdx.json", f"trainer-{__version__}.cdx.json"),
    *("provenance.json", "SHA256SUMS"),
]
SIGNED = [*FILES, *(f"{name}.sig" for name in FILES), "provenance.dsse.json"]


def openssl(*arguments: str | Path) -> str:
    return subprocess.run(
        ["openssl", *arguments], check=True, capture_output=True, text=True
    ).stdout


def new_key(folder: Path, name: str) -> tuple[Path, Path]:
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    return private, public


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a release and the public key."""
    folder = tmp_path_factory.mktemp("release")
    private, public = new_key(folder, "a")
    write_release(ROOT, folder / "dist", __version__, BUILD)
    sign_release(folder / "dist", private)
    return folder / "dist", public


@pytest.fixture
def copied(signed: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    shutil.copytree(signed[0], tmp_path / "dist")
    return tmp_path / "dist", signed[1]


@pytest.mark.slow
def test_a_signed_release_is_whole(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    assert sorted(path.name for path in folder.iterdir()) == sorted(SIGNED)
    lines = verify_release(folder, public)
    assert [line.split(":")[0] for line in lines[:-1]] == FILES[:-1]
    assert lines[-1] == f"made of commit {BUILD.commit} by {BUILD.builder}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("place", [0.0, 0.5])
def test_another_byte_is_refused(copied: tuple[Path, Path], name: str, place: float) -> None:
    folder, public = copied
    content = bytearray((folder / name).read_bytes())
    content[int(len(content) * place)] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ReleaseError, match=name.removesuffix(".sig")):
        verify_release(folder, public)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNED)
def test_a_missing_file_is_refused(copied: tuple[Path, Path], name: str) -> None:
    folder, public = copied
    (folder / name).unlink()
    with pytest.raises(ReleaseError, match=f"{name}: is missing"):
        verify_release(folder, public)


@pytest.mark.parametrize("name", ["SHA256SUMS", "SHA256SUMS.sig"])
def test_a_pipe_is_refused_and_not_waited_for(copied: tuple[Path, Path], name: str) -> None:
    folder, public = copied
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ReleaseError, match=f"{name}: is no file"):
        verify_release(folder, public)


def test_a_file_that_nobody_signed_is_refused(copied: tuple[Path, Path]) -> None:
    folder, public = copied
    (folder / "fluxtrain-9.9.9-py3-none-any.whl").write_bytes(b"")
    with pytest.raises(ReleaseError, match=r"9\.9\.9-py3-none-any.whl: is not part"):
        verify_release(folder, public)


def test_another_key_and_the_signature_of_another_file_are_refused(
    copied: tuple[Path, Path],
) -> None:
    folder, public = copied
    _, other = new_key(folder.parent, "other")
    with pytest.raises(ReleaseError, match="SHA256SUMS: its signature is not by"):
        verify_release(folder, other)
    shutil.copy(folder / f"{CHART}.sig", folder / f"{WHEEL}.sig")
    with pytest.raises(ReleaseError, match=f"{WHEEL}: its signature"):
        verify_release(folder, public)


def test_an_envelope_of_another_release_is_refused(copied: tuple[Path, Path]) -> None:
    folder, public = copied
    private, public = new_key(folder.parent, "b")
    sign_release(folder, private)
    kept = (folder / "provenance.dsse.json").read_bytes()
    (folder / "provenance.json").write_text("{}")
    text = (folder / "SHA256SUMS").read_text()
    digest = openssl("dgst", "-sha256", "-r", folder / "provenance.json").split()[0]
    old = next(line for line in text.splitlines() if line.endswith("  provenance.json"))
    (folder / "SHA256SUMS").write_text(text.replace(old, f"{digest}  provenance.json"))
    sign_release(folder, private)
    (folder / "provenance.dsse.json").write_bytes(kept)
    with pytest.raises(ReleaseError, match=r"provenance.dsse.json: is not provenance.json"):
        verify_release(folder, public)


def test_openssl_and_sha256sum_alone_check_a_release(signed: tuple[Path, Path]) -> None:
    """The commands of docs/supply-chain.md, for people without this project."""
    folder, public = signed
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    for name in FILES:
        signature = folder.parent / "signature"
        signature.write_bytes(base64.b64decode((folder / f"{name}.sig").read_bytes()))
        said = openssl(
            *("dgst", "-sha256", "-verify", public, "-signature", signature, folder / name)
        )
        assert said == "Verified OK\n"


def test_the_statement_has_the_sources_the_locks_and_every_package(
    signed: tuple[Path, Path],
) -> None:
    found = json.loads((signed[0] / "provenance.json").read_text())
    assert found["_type"] == "https://in-toto.io/Statement/v1"
    assert found["predicateType"] == "https://slsa.dev/provenance/v1"
    assert [subject["name"] for subject in found["subject"]] == FILES[:-2]
    definition = found["predicate"]["buildDefinition"]
    inputs = definition["resolvedDependencies"]
    assert inputs[0]["digest"] == {"gitCommit": BUILD.commit}
    digests = {part["digest"]["sha256"] for part in inputs[1:]}
    for image in LOCKS:
        lock = openssl("dgst", "-sha256", "-r", ROOT / "images" / f"{image}-requirements.lock")
        assert lock.split()[0] in digests
        assert {digest for package in read_lock(image) for digest in package.hashes} <= digests


@pytest.mark.slow
def test_the_same_sources_give_the_same_release(signed: tuple[Path, Path], tmp_path: Path) -> None:
    """In a folder of another name, with other times and, but for programs, other modes of the files."""

    def copy(source: str, target: str) -> None:
        shutil.copyfile(source, target)
        Path(target).chmod(0o700 if os.access(source, os.X_OK) else 0o600)

    other = tmp_path / "other"
    other.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        copy(str(ROOT / name), str(other / name))
    for name in ("operator", "trainer", "charts", "images"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, other / name, ignore=ignored, copy_function=copy)
    for path in write_release(other, tmp_path / "dist", __version__, BUILD):
        same = path.read_bytes() == (signed[0] / path.name).read_bytes()
        assert same, path.name


def test_the_chart_has_the_files_that_helm_expects(signed: tuple[Path, Path]) -> None:
    chart = ROOT / "charts" / "fluxtrain-operator"
    with tarfile.open(signed[0] / CHART) as tar:
        names = {member.name for member in tar.getmembers()}
    kept = {
        path.relative_to(chart.parent).as_posix() for path in chart.rglob("*") if path.is_file()
    }
    assert names == kept
    assert "fluxtrain-operator/Chart.yaml" in names


def test_a_key_that_is_none_is_named(signed: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "a.key").write_text("no key\n")
    with pytest.raises(ReleaseError, match=r"a.key: openssl dgst: "):
        sign_release(signed[0], tmp_path / "a.key")
    with pytest.raises(ReleaseError, match=r"b.pub: there is no such file"):
        verify_release(signed[0], tmp_path / "b.pub")


def test_sources_that_are_not_committed_are_no_release(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "--message=a")
    assert len(build_of(tmp_path).commit) == 40
    (tmp_path / "a").write_text("2")
    with pytest.raises(ReleaseError, match="the sources differ from their commit"):
        build_of(tmp_path)


def test_a_file_instead_of_the_folder_of_a_release_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "release"
    file.write_text("")
    with pytest.raises(ReleaseError, match="must be the folder of a release"):
        verify_release(file, tmp_path / "public.pem")
