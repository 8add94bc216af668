"""Pictures of URLs: equal to those of a folder, on any ranks, whenever a process is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from tests.trainer import in_process, ranks
from tests.trainer.fetch.conftest import environment
from tests.trainer.fetch.servers import COMMIT, FileServer
from tests.trainer.picture_cache.folders import cache, cache_together, config
from tests.trainer.picture_cache.remote.remote_pictures import (
    BUCKET,
    COUNT,
    HUB,
    asking,
    encodings,
    run_of,
    table,
)

from fluxtrain.contract.process import RunPaths
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.parallel.distributed import World
from fluxtrain.picture_cache.fetching import PINS
from fluxtrain.picture_cache.stage import check_pictures


def test_every_source_gives_the_encodings_of_the_folder(
    server: FileServer, roots: RunPaths, tmp_path: Path
) -> None:
    expected = encodings(roots.output)
    for number, url in enumerate((BUCKET, HUB, "s3://bucket/shards", f"{server.url}/web/all.tar")):
        paths = RunPaths(tmp_path / f"out{number}", roots.data, roots.models)
        run = run_of(paths, url)
        check_pictures(run, paths)
        found = cache(run, paths, World.alone()).open(run, paths.output)[0]
        assert encodings(paths.output) == expected, url
        names = [found.key(index).rpartition("/")[2] for index in range(len(found))]
        assert names == sorted(path.name for path in (roots.data / "pictures").glob("[0-9]*[pg]"))
    assert json.loads((tmp_path / "out1" / PINS).read_text())[HUB]["pinned"].endswith(f"@{COMMIT}")


def test_a_data_set_of_the_hub_in_parquet_gives_the_encodings_of_the_folder(
    server: FileServer, roots: RunPaths, paths: RunPaths
) -> None:
    folder, hub = roots.data / "pictures", "hf://datasets/owner/table"
    names = sorted(path.name for path in folder.iterdir() if path.suffix != ".txt")
    for number, part in enumerate((names[:5], names[5:])):
        at = f"datasets/owner/table/data/train-0000{number}-of-00002.parquet"
        server.files[at] = table(folder, part)
    server.files["datasets/owner/table/data/test-00000-of-00001.parquet"] = b"not read"
    run = run_of(paths, hub)
    check_pictures(run, paths)
    found = cache(run, paths, World.alone()).open(run, paths.output)[0]
    assert encodings(paths.output) == encodings(roots.output)
    assert found.key(5) == "data%2Ftrain-00001-of-00002/00000000." + names[5].rpartition(".")[2]
    assert "datasets/owner/table/data/test-00000-of-00001.parquet" not in server.sent
    run = run_of(paths, hub, table={"split": "dev"})
    with pytest.raises(ConfigError, match=r"table\.split: got 'dev'; .* there are train, test"):
        check_pictures(run, paths)


def test_shards_on_a_volume_give_the_encodings_of_the_folder(
    server: FileServer, roots: RunPaths, tmp_path: Path
) -> None:
    shards = tmp_path / "data" / "shards"
    shards.mkdir(parents=True)
    for number in range(3):
        (shards / f"s-{number}.tar").write_bytes(server.files[f"bucket/shards/s-{number}.tar"])
    (shards / "notes.md").touch()
    given = "shards", "shards/s-{0..2}.tar", "s3://bucket/shards/s-{0..2}.tar"
    for number, images in enumerate((*given, f"{server.url}/web/s-{{0..2}}.tar")):
        paths = RunPaths(tmp_path / f"out{number}", tmp_path / "data", roots.models)
        run = run_of(paths, images)
        check_pictures(run, paths)
        found = cache(run, paths, World.alone()).open(run, paths.output)[0]
        assert encodings(paths.output) == encodings(roots.output), images
        assert found.key(8).startswith("s-2/008.")
    assert len(list(shards.iterdir())) == 4  # nothing is written or removed there


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("shards/s-{0..3}.tar", r"s-3\.tar is missing"),
        ("s3://bucket/shards/s-{0..4}.tar", r"s-3\.tar is missing, and so are 1 more"),
        ("shards/s-{0..2.tar", "its braces are not balanced"),
        ("shards/s-{0..99999999}.tar", "it stands for more than 100,000 files"),
        ("nothing/s-0.tar", r"nothing/s-0\.tar is missing"),
        ("shards/s-9.tar", r"s-9\.tar is missing"),
    ],
)
def test_shards_that_are_missing_are_named_before_the_start(
    server: FileServer, roots: RunPaths, tmp_path: Path, images: str, message: str
) -> None:
    (tmp_path / "data/shards").mkdir(parents=True)
    for number in range(3):
        (tmp_path / f"data/shards/s-{number}.tar").touch()
    paths = RunPaths(tmp_path / "out", tmp_path / "data", roots.models)
    with pytest.raises(ConfigError, match=rf"^spec\.run\.data\.images: got '.*; .*{message}"):
        check_pictures(run_of(paths, images), paths)


def test_ranks_fetch_once_and_write_the_same(
    server: FileServer, roots: RunPaths, paths: RunPaths
) -> None:
    run = run_of(paths, BUCKET)
    variables = {**environment(server), "LOCAL_WORLD_SIZE": "2"}
    together = partial(asking, variables, partial(cache_together, port=free_port()))
    assert ranks.finish(together, run, paths, 2) == [0, 0], ranks.output_of(paths)
    assert encodings(paths.output) == encodings(roots.output)
    assert server.sent == {name: len(server.files[name]) for name in server.sent}
    assert len(server.sent) == 2 * COUNT
    said = ranks.output_of(paths, 0) + ranks.output_of(paths, 1)
    assert said.count("fetch 18 files, ") == 1  # by the rank that was first


@pytest.mark.parametrize(
    ("url", "moments"), [(BUCKET, (5, 12, 20, 27)), ("s3://bucket/shards", (2, 3, 4, 6))]
)
def test_killed_at_any_moment_it_writes_the_same(
    server: FileServer, roots: RunPaths, paths: RunPaths, url: str, moments: tuple[int, ...]
) -> None:
    chance, kills, run = random.Random(1), 0, run_of(paths, url)
    server.before = lambda path: time.sleep(0.05)
    for moment in moments:
        (process,) = ranks.start(partial(asking, environment(server), cache), run, paths)
        target = server.requests.total() + moment
        while process.is_alive() and server.requests.total() < target:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        kills += process.is_alive()
        process.kill()
        process.join()
    assert kills >= 2
    assert in_process.finish(cache, run, paths) == [0]
    assert encodings(paths.output) == encodings(roots.output)
    assert cache(run, paths, World.alone()).missing_pictures == []


def test_a_stopped_run_keeps_what_is_fetched(
    server: FileServer, roots: RunPaths, paths: RunPaths
) -> None:
    run = run_of(paths, BUCKET)
    server.before = lambda path: time.sleep(0.2)
    together = partial(asking, environment(server), partial(cache_together, port=free_port()))
    (process,) = ranks.start(together, run, paths)
    while process.is_alive() and not server.sent:
        time.sleep(0.01)
    assert process.is_alive(), ranks.output_of(paths)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 75
    assert "stopped; what is fetched is kept" in ranks.output_of(paths)


def test_a_source_that_changed_is_refused_when_the_run_goes_on(
    server: FileServer, paths: RunPaths
) -> None:
    run = run_of(paths, BUCKET)
    found = cache(run, paths, World.alone())
    server.change("bucket/pictures/000.txt", b"one caption")
    check_pictures(run, paths)
    found.open(run, paths.output)
    with pytest.raises(ConfigError, match=r"has changed since the run began, with 18"):
        check_pictures(run, paths)
    server.change("bucket/pictures/000.txt", b"another caption")
    with pytest.raises(ConfigError, match=r"got 's3.*; has changed since the run began, with 18"):
        check_pictures(run, paths)


def test_the_commit_of_a_run_stays_what_it_was(
    server: FileServer, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(paths, HUB)
    cache(run, paths, World.alone())
    monkeypatch.setattr("tests.trainer.fetch.servers.COMMIT", "d" * 40)
    cache(run, paths, World.alone())
    pins = json.loads((paths.output / PINS).read_text())
    assert pins[HUB]["pinned"].endswith(COMMIT)
    assert f"api/datasets/owner/pictures/revision/{COMMIT}" in server.requests


def test_a_folder_that_is_too_small_is_refused_before_anything_is_sent(
    server: FileServer, paths: RunPaths
) -> None:
    server.change("bucket/pictures/000.png", bytes(2 << 20))
    run = run_of(paths, BUCKET, download={"max_bytes": 1 << 20})
    with pytest.raises(DataError, match=r"spec\.run\.data\.download\.max_bytes: 0\.00 GiB do not"):
        cache(run, paths, World.alone())
    assert not server.sent


def test_a_config_of_kohyas_may_name_urls(
    server: FileServer, roots: RunPaths, paths: RunPaths, tmp_path: Path
) -> None:
    subset = {"image_dir": BUCKET, "num_repeats": 2}
    content: dict[str, Any] = {"datasets": [{"subsets": [subset, {"image_dir": "pictures"}]}]}
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps(content))
    run = run_of(paths, str(path))
    found = cache(run, paths, World.alone()).open(run, paths.output)[0]
    assert (len(found), found.key(0)) == (3 * COUNT, f"{BUCKET}/000.png")
    subset["image_dir"] = "s3://key:word@bucket/p"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        check_pictures(run, paths)
    assert "image_dir: got 's3://***@bucket/p'; must not contain a user name" in str(caught.value)


def test_a_cut_off_shard_is_named(server: FileServer, paths: RunPaths) -> None:
    content = server.files["bucket/shards/s-1.tar"]
    server.change("bucket/shards/s-1.tar", content[:1000])
    with pytest.raises(
        ConfigError, match=r"got 's3://bucket/shards'; s-1\.tar: not a whole tar \("
    ):
        cache(run_of(paths, "s3://bucket/shards"), paths, World.alone())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://user:word@host/p.tar", "got 'https://***@host/p.tar'; must not contain a user name"),
        ("https://host/p.tar?X-Amz-Signature=word", "p.tar?***'; must not contain a key or a token"),
        ("ftp://host/p.tar", "must be a path, or a URL that begins with https://host/"),
        ("hf://owner/name", "must be a path, or a URL that begins with"),
        ("hf://datasets/name", "must be a path, or a URL that begins with"),
        ("s3://", "must be a path, or a URL that begins with"),
    ],
)  # fmt: skip
def test_a_url_that_is_not_read_is_refused_without_its_secrets(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(data={"images": url})
    assert str(caught.value).startswith("spec.run.data.images: got '")
    assert message in str(caught.value)
    assert "word" not in str(caught.value)
