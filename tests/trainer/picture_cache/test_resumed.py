"""A run that goes on with all its encodings reads nothing of its source again, unless that is named anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.cli.bad_inputs.bad_pictures import tar
from tests.trainer.fetch.conftest import point_at
from tests.trainer.fetch.servers import FileServer
from tests.trainer.picture_cache.folders import cache, config, write_pictures

from fluxtrain.contract.process import CHECKPOINTS_FOLDER, RunPaths
from fluxtrain.errors import ConfigError
from fluxtrain.parallel.distributed import World
from fluxtrain.picture_cache.stage import check_pictures

pytestmark = pytest.mark.slow

COUNT = 5
BUCKET = "s3://bucket/set"


@pytest.fixture
def paths(tmp_path: Path, models: Path) -> RunPaths:
    write_pictures(tmp_path / "data/pictures", COUNT)
    return RunPaths(tmp_path / "out", tmp_path / "data", models)


@pytest.fixture
def server(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    pictures = (paths.data / "pictures").iterdir()
    with FileServer({f"bucket/set/{path.name}": path.read_bytes() for path in pictures}) as server:
        point_at(server, monkeypatch)
        yield server


def run_of(paths: RunPaths, images: str, **data: Any) -> Any:
    folder = str(paths.output.parent / "node")
    return config(data={"images": images, "download": {"folder": folder}, **data})


def begun(run: Any, paths: RunPaths) -> list[tuple[str, ...]]:
    """Encode the pictures of ``run``, and let it have a checkpoint; return its samples."""
    dataset = cache(run, paths, World.alone(), is_new=True).open(run, paths.output)[0]
    step = paths.output / CHECKPOINTS_FOLDER / "step_0000000001"
    step.mkdir(parents=True)
    (step / "DONE").write_text("")
    shutil.rmtree(paths.output.parent / "node")  # another node
    return [(entry.name, *entry.captions) for entry in dataset.entries]


def test_nothing_is_listed_or_fetched(
    server: FileServer, paths: RunPaths, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_of(paths, BUCKET)
    samples = begun(run, paths)
    server.requests.clear()
    server.denied.add("bucket")
    check_pictures(run, paths)
    found = cache(run, paths, World.alone(), is_new=False).open(run, paths.output)[0]
    assert [(entry.name, *entry.captions) for entry in found.entries] == samples
    assert not server.requests
    assert not (paths.output.parent / "node").exists()
    assert "their source is not read again" in capfd.readouterr().err


def test_shards_of_a_volume_are_not_unpacked_again(paths: RunPaths) -> None:
    (paths.data / "shards").mkdir()
    members = {
        path.name.replace(".", "__"): path.read_bytes()
        for path in sorted((paths.data / "pictures").iterdir())
    }
    (paths.data / "shards/s.tar").write_bytes(tar(**members))
    run = run_of(paths, "shards")
    samples = begun(run, paths)
    (paths.data / "shards/s.tar").write_bytes(b"no tar")
    found = cache(run, paths, World.alone(), is_new=False).open(run, paths.output)[0]
    assert [(entry.name, *entry.captions) for entry in found.entries] == samples


@pytest.mark.parametrize("folder", ["latents", "texts"])
def test_what_lacks_is_fetched_and_encoded(
    server: FileServer, paths: RunPaths, folder: str
) -> None:
    run = run_of(paths, BUCKET)
    samples = begun(run, paths)
    next((paths.output / "cache" / folder).glob("[!.]*")).unlink()
    server.requests.clear()
    found = cache(run, paths, World.alone(), is_new=False).open(run, paths.output)[0]
    assert [(entry.name, *entry.captions) for entry in found.entries] == samples
    assert server.requests


def test_another_configuration_is_noticed(
    server: FileServer, paths: RunPaths, capfd: pytest.CaptureFixture[str]
) -> None:
    def write(repeats: int) -> None:
        subsets = [{"image_dir": BUCKET, "num_repeats": repeats}]
        (paths.data / "set.json").write_text(json.dumps({"datasets": [{"subsets": subsets}]}))

    write(2)
    run = run_of(paths, "set.json")
    begun(run, paths)
    write(3)
    for _ in range(2):  # it is told at each start
        cache(run, paths, World.alone(), is_new=False)
        assert f"pictures: {COUNT} with other repeats since the run began" in capfd.readouterr().err
    server.denied.add("bucket")
    with pytest.raises(ConfigError, match="denied"):
        check_pictures(run, paths)


def test_a_new_run_lists_its_source(server: FileServer, paths: RunPaths) -> None:
    run = run_of(paths, BUCKET)
    cache(run, paths, World.alone(), is_new=True).open(run, paths.output)
    server.requests.clear()
    cache(run, paths, World.alone(), is_new=True)
    assert server.requests
