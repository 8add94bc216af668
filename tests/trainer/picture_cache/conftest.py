"""Models, pictures and servers that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer import in_process
from tests.trainer.fetch.conftest import point_at
from tests.trainer.fetch.servers import FileServer
from tests.trainer.picture_cache.folders import cache, config, write_pictures
from tests.trainer.picture_cache.remote.remote_pictures import COUNT, shard
from tests.trainer.tiny_encoders import write_encoders

from fluxtrain.contract.process import RunPaths


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a models root with tiny encoders."""
    return write_encoders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory, models: Path) -> RunPaths:
    """Return roots with a folder of pictures, and its encodings in the output."""
    root = tmp_path_factory.mktemp("roots")
    write_pictures(root / "data/pictures", COUNT)
    paths = RunPaths(root / "out", root / "data", models)
    assert in_process.finish(cache, config(), paths) == [0]
    return paths


@pytest.fixture
def server(roots: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Return a server with the pictures as files and as shards."""
    folder, files = roots.data / "pictures", dict[str, bytes]()
    for path in sorted(folder.iterdir()):
        for prefix in ("bucket/pictures", "datasets/owner/pictures"):
            files[f"{prefix}/{path.name}"] = path.read_bytes()
    names = sorted(path.name for path in folder.iterdir() if path.suffix != ".txt")
    for number in range(3):
        content = shard(folder, names[3 * number : 3 * number + 3])
        for prefix in ("bucket/shards", "web"):
            files[f"{prefix}/s-{number}.tar"] = content
    files["web/all.tar"] = shard(folder, names)
    with FileServer(files) as server:
        point_at(server, monkeypatch)
        yield server


@pytest.fixture
def paths(roots: RunPaths, tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "out", roots.data, roots.models)
