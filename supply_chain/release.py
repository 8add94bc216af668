"""A release: Python packages, the chart, lists of packages, their provenance, checksums and signatures."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from supply_chain import checksums, sbom
from supply_chain.checksums import ReleaseError
from supply_chain.provenance import Build, encoded, statement
from supply_chain.signatures import envelope, is_signed, opened, sign

PROVENANCE = "provenance.json"
ENVELOPE = "provenance.dsse.json"
SIGNATURE = ".sig"
LOCAL = "https://fluxtrain.dev/builder/local"
"""The builder if none is named: some machine, of which nothing is claimed."""


def build_of(root: Path, builder: str = "", source: str = "") -> Build:
    """Return the build of the commit in ``root``, whose files must be that commit's."""
    if _git(root, "status", "--porcelain"):
        raise ReleaseError(
            "the sources differ from their commit: commit, or remove, what git status shows"
        )
    seconds = int(_git(root, "log", "-1", "--format=%ct"))
    return Build(_git(root, "rev-parse", "HEAD"), seconds, builder or LOCAL, source)


def write_release(root: Path, folder: Path, version: str, build: Build) -> list[Path]:
    """Write the files of a release of ``root`` to the empty ``folder``; return them with SHA256SUMS."""
    if folder.exists() and any(folder.iterdir()):
        raise ReleaseError(f"{folder}: is not empty")
    documents = sbom.write(folder, version, root)
    packages = write_packages(root, folder, build)
    chart = folder / f"fluxtrain-operator-{version}.tgz"
    write_chart(root / "charts" / "fluxtrain-operator", chart, build.seconds)
    files = [*packages, chart, *documents]
    (folder / PROVENANCE).write_bytes(encoded(statement(build, root, files)))
    files.append(folder / PROVENANCE)
    return [*files, checksums.write(files)]


def write_packages(root: Path, folder: Path, build: Build) -> list[Path]:
    """Write the wheel and the source distribution of ``root`` to ``folder``."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder.resolve()]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(build.seconds)}
    subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)
    return [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]


def sign_release(folder: Path, key: Path) -> list[Path]:
    """Sign every file of the release in ``folder``; return the paths of the signatures."""
    if not (folder / checksums.NAME).is_file():
        raise ReleaseError(f"{folder}: is no release: make release writes one")
    paths = list[Path]()
    for name in (*checksums.read(folder), checksums.NAME):
        content = (folder / name).read_bytes()
        paths.append(folder / f"{name}{SIGNATURE}")
        paths[-1].write_bytes(base64.b64encode(sign(content, key)) + b"\n")
    paths.append(folder / ENVELOPE)
    paths[-1].write_text(json.dumps(envelope((folder / PROVENANCE).read_bytes(), key)) + "\n")
    return paths


def verify_release(folder: Path, public_key: Path) -> list[str]:
    """Return a line for each file of the release in ``folder``.

    Raises ReleaseError if one is missing, not signed by ``public_key``, other than what was signed, or
    nowhere listed.
    """
    if not folder.is_dir():
        raise ReleaseError(f"{folder}: must be the folder of a release")
    for path in folder.iterdir():
        if path.exists() and not path.is_file():
            raise ReleaseError(f"{path.name}: is no file")  # a pipe would be waited for
    _check_signature(folder, checksums.NAME, public_key)
    listed = checksums.read(folder)
    for name, digest in listed.items():
        if not (folder / name).is_file():
            raise ReleaseError(f"{name}: is missing")
        if checksums.sha256(folder / name) != digest:
            raise ReleaseError(f"{name}: is not the file that {checksums.NAME} lists")
        _check_signature(folder, name, public_key)
    commit = _check_provenance(folder, listed, public_key)
    known = {*listed, checksums.NAME, ENVELOPE}
    known |= {f"{name}{SIGNATURE}" for name in known - {ENVELOPE}}
    if others := sorted({path.name for path in folder.iterdir()} - known):
        raise ReleaseError(f"{others[0]}: is not part of the release")
    return [f"{name}: signed, sha256 {digest}" for name, digest in listed.items()] + [commit]


def _check_signature(folder: Path, name: str, public_key: Path) -> None:
    try:
        content = (folder / name).read_bytes()
        signature = base64.b64decode(
            (folder / f"{name}{SIGNATURE}").read_bytes().removesuffix(b"\n"), validate=True
        )
    except FileNotFoundError as error:
        raise ReleaseError(f"{Path(error.filename).name}: is missing") from None
    except ValueError:
        raise ReleaseError(f"{name}{SIGNATURE}: is no signature") from None
    if not is_signed(content, signature, public_key):
        raise ReleaseError(f"{name}: its signature is not by {public_key}")


def _check_provenance(folder: Path, listed: dict[str, str], public_key: Path) -> str:
    """Compare the signed statement with the files; return a line about the sources."""
    if not (folder / ENVELOPE).is_file():
        raise ReleaseError(f"{ENVELOPE}: is missing")
    payload = opened((folder / ENVELOPE).read_bytes(), public_key)
    if payload is None or payload != (folder / PROVENANCE).read_bytes():
        raise ReleaseError(f"{ENVELOPE}: is not {PROVENANCE}, signed by {public_key}")
    found = json.loads(payload)
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in found["subject"]}
    if subjects != {name: digest for name, digest in listed.items() if name != PROVENANCE}:
        raise ReleaseError(f"{PROVENANCE}: is of other files than {checksums.NAME}")
    predicate = found["predicate"]
    commit = predicate["buildDefinition"]["externalParameters"]["commit"]
    return f"made of commit {commit} by {predicate['runDetails']['builder']['id']}"


def _git(root: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=root, check=False, capture_output=True, text=True)
    if run.returncode:
        raise ReleaseError(
            f"git {arguments[0]}: {(run.stderr.strip().splitlines() or ['failed'])[0]}"
        )
    return run.stdout.strip()


def write_chart(chart: Path, archive: Path, seconds: int) -> None:
    """Write the folder ``chart`` to ``archive``; all files get the time ``seconds`` after 1970."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(chart.rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(f"{chart.name}/{path.relative_to(chart).as_posix()}")
                entry.size, entry.mtime, entry.mode = path.stat().st_size, seconds, 0o644
                tar.addfile(entry, io.BytesIO(path.read_bytes()))
    with archive.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(content.getvalue())
