"""Streamed pictures: the samples and the losses of fetched ones, with the disk of a few shards."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from cluster.free_ports import free_port
from tests.trainer import in_process, ranks
from tests.trainer.fetch.conftest import environment
from tests.trainer.fetch.servers import FileServer
from tests.trainer.outputs import losses
from tests.trainer.picture_cache.folders import cache, cache_together, file_of, noise
from tests.trainer.picture_cache.remote.remote_pictures import (
    BUCKET,
    HUB,
    asking,
    encodings,
    run_of,
    shard,
    table,
)

from fluxtrain.contract.process import CHECKPOINTS_FOLDER, RunPaths
from fluxtrain.errors import ConfigError, DataError, FluxtrainError, StorageError
from fluxtrain.fetch.http import DownloadError
from fluxtrain.parallel.distributed import World
from fluxtrain.picture_cache.check import run_pictures
from fluxtrain.picture_cache.stage import check_pictures

SHARDS = "s3://bucket/shards"
STREAM = {"download": {"stream": True}}
PADDING = 300_000
"""Bytes of each shard that are no picture: some shards do not fit into 1 MiB together."""


@pytest.fixture
def server(server: FileServer, roots: RunPaths) -> FileServer:
    """Return a server with files that cannot be used, shards of any names, and tables too."""
    folder = roots.data / "pictures"
    names = sorted(path.name for path in folder.iterdir() if path.suffix != ".txt")
    broken = {"zz.png": b"no picture", "zz.txt": b"?", "aa.png": file_of(noise(40, 40), "PNG")}
    broken |= {"aa.txt": b"\xff\xfe\x00", "below/b.png": file_of(noise(50, 40), "PNG")}
    server.files |= {f"bucket/pictures/{name}": content for name, content in broken.items()}
    for name in ("bucket/shards/s 9%é.tar", "bucket/shards/below/s-0.tar"):
        server.files[name] = shard(folder, names[:2])
    server.files["bucket/shards/empty.tar"] = bytes(10240)
    for number, part in enumerate((names[:5], names[5:])):
        at = f"datasets/owner/table/data/train-0000{number}-of-00002.parquet"
        server.files[at] = table(folder, part)
    metadata = [{"file_name": name, "text": f"a {name}"} for name in names[:4]]
    lines = "".join(
        json.dumps(row) + "\n" for row in [*metadata, {"file_name": "no.png", "text": ""}]
    )
    server.files["datasets/owner/pictures/metadata.jsonl"] = lines.encode()
    return server


def outcome(run: Any, paths: RunPaths, is_new: bool = True) -> dict[str, str]:
    """Encode the pictures of ``run``; return what is written of its samples."""
    cache(run, paths, World.alone(), is_new).open(run, paths.output)
    return {
        name: (paths.output / name).read_text() for name in ("training_set.json", "pictures.json")
    }


def left(paths: RunPaths) -> list[str]:
    """Return what is in the folder of the node."""
    return os.listdir(paths.output.parent / "node/entries")


@pytest.mark.parametrize("url", [BUCKET, HUB, SHARDS, "hf://datasets/owner/table"])
def test_the_samples_are_those_of_a_fetched_source(
    server: FileServer, roots: RunPaths, tmp_path: Path, url: str
) -> None:
    (tmp_path / "a").mkdir()
    fetched, streamed = (RunPaths(tmp_path / x / "out", roots.data, roots.models) for x in "ab")
    data: dict[str, Any] = {
        "repeats": 2,
        "caption_prefix": "ohwx,",
        "validation_split": 0.2,
        "variants": {"flip": True, "crops": 2, "captions": 2, "shuffle_caption": True},
    }
    expected = outcome(run_of(fetched, url, **data), fetched)
    sent = server.sent.copy()
    run = run_of(streamed, url, **data, **STREAM)
    check_pictures(run, streamed)
    assert outcome(run, streamed) == expected
    assert server.sent - sent == {at: n for at, n in sent.items() if "aa.png" not in at}  # once
    assert encodings(streamed.output) == encodings(fetched.output)
    assert left(streamed) == []
    before = server.sent.copy()
    assert outcome(run, streamed) == expected
    again = server.sent - before
    assert set(again) <= {name for name in server.files if name.endswith((".txt", ".jsonl"))}


def test_shards_on_a_volume_are_unpacked_one_after_the_other(
    server: FileServer, roots: RunPaths, tmp_path: Path
) -> None:
    (tmp_path / "data/shards").mkdir(parents=True)
    for number in range(3):
        (tmp_path / f"data/shards/s-{number}.tar").write_bytes(
            server.files[f"bucket/shards/s-{number}.tar"]
        )
    paths = RunPaths(tmp_path / "out", tmp_path / "data", roots.models)
    expected = outcome(run_of(paths, "shards"), paths)
    streamed = RunPaths(tmp_path / "b/out", tmp_path / "data", roots.models)
    assert outcome(run_of(streamed, "shards", **STREAM), streamed) == expected
    assert left(streamed) == []
    assert len(list((tmp_path / "data/shards").iterdir())) == 3


def test_a_config_of_kohyas_with_two_settings_of_a_url_and_a_folder(
    server: FileServer, roots: RunPaths, tmp_path: Path
) -> None:
    sets = [
        {"image_dir": SHARDS, "num_repeats": 2},
        {"image_dir": SHARDS, "flip_aug": True, "is_reg": True},
        {"image_dir": "pictures"},
    ]
    path = tmp_path / "d.json"
    path.write_text(json.dumps({"datasets": [{"subsets": sets}]}))
    found = []
    for name, data in (("a", {}), ("b", STREAM)):
        paths = RunPaths(tmp_path / name / "out", roots.data, roots.models)
        found.append(outcome(run_of(paths, str(path), **data), paths))
    assert found[0] == found[1]


def test_the_losses_are_those_of_a_fetched_source_on_any_ranks(
    server: FileServer, roots: RunPaths, tmp_path: Path
) -> None:
    found, sets = {}, set()
    for size, data in ((1, {}), (1, STREAM), (2, STREAM), (3, STREAM)):
        name = f"{size}{'s' * bool(data)}"
        paths = RunPaths(tmp_path / name / "out", roots.data, roots.models)
        train = ranks.train_alone if size == 1 else partial(ranks.train_together, port=free_port())
        server.sent.clear()
        codes = in_process.finish(
            partial(asking, environment(server), train), run_of(paths, SHARDS, **data), paths, size
        )
        assert codes == [0] * size, ranks.output_of(paths)
        shards = {at: len(c) for at, c in server.files.items() if at.startswith("bucket/shards/")}
        assert server.sent == shards  # each byte once, on any ranks
        found[name] = list(losses(paths.output).values())
        sets.add((paths.output / "training_set.json").read_text())
        assert data == {} or left(paths) == []
    assert len(sets) == 1
    assert found["1s"] == found["1"]
    assert found["2s"] == pytest.approx(found["1"], rel=1e-4)
    assert found["3s"] == pytest.approx(found["1"], rel=1e-4)


class Hold:
    """Lets a server answer until the file number ``number`` is asked for, and nothing more until `end`."""

    def __init__(self, server: FileServer, number: int) -> None:
        self.server, self.number, self.asked = server, number, set[str]()
        self.is_reached, self.is_over = Event(), Event()
        server.before = self._before

    def _before(self, path: str) -> None:
        if path in self.server.files and not path.endswith(".txt"):
            self.asked.add(path)
        if len(self.asked) >= self.number:
            self.is_reached.set()
            self.is_over.wait(100)

    def end(self) -> None:
        self.server.before = lambda path: None
        self.is_over.set()


@pytest.mark.parametrize(
    ("url", "size", "part", "numbers"),
    [(SHARDS, 1, 1, (5,)), (SHARDS, 2, 1, (2, 2, 2)), (BUCKET, 1, 4, (2, 2, 5))],
)
def test_killed_at_any_moment_no_part_that_is_encoded_is_fetched_again(
    server: FileServer,
    roots: RunPaths,
    paths: RunPaths,
    url: str,
    size: int,
    part: int,
    numbers: tuple[int, ...],
) -> None:
    other = RunPaths(paths.output.parent / "other/out", roots.data, roots.models)
    expected = outcome(run_of(other, url), other)
    server.sent.clear()
    run = run_of(paths, url, **STREAM)
    for number in numbers:
        hold = Hold(server, number)
        together = partial(cache_together, port=free_port())
        processes = ranks.start(partial(asking, environment(server), together), run, paths, size)
        assert hold.is_reached.wait(100), ranks.output_of(paths)
        for process in processes:
            process.kill()
            process.join()
        hold.end()
    assert outcome(run, paths) == expected
    assert encodings(paths.output) == encodings(other.output)
    assert url != SHARDS or left(paths) == []
    # at most two parts of each rank are fetched again after each kill
    files = [at for at in server.sent if not at.endswith(".txt")]
    again = sum(server.sent[at] // len(server.files[at]) - 1 for at in files)
    assert again <= len(numbers) * size * 2 * part


def padded(server: FileServer, roots: RunPaths) -> int:
    """Make the shards large; return the bytes of all."""
    folder = roots.data / "pictures"
    names = sorted(path.name for path in folder.iterdir() if path.suffix != ".txt")
    for number, name in enumerate(names):
        content = shard(folder, [name])[:-1024].rstrip(b"\0")
        content += bytes(-len(content) % 512)
        server.files[f"bucket/large/{number}.tar"] = content + bytes(PADDING)
    return sum(len(c) for at, c in server.files.items() if at.startswith("bucket/large/"))


def test_the_disk_is_bounded_by_a_few_shards(
    server: FileServer, roots: RunPaths, paths: RunPaths
) -> None:
    total, most, node = padded(server, roots), [0], paths.output.parent / "node/entries"

    def measure(path: str) -> None:
        files = [file for file in node.rglob("*") if file.is_file()]
        most[0] = max(most[0], sum(file.stat().st_size for file in files if file.exists()))

    server.before = measure
    large = {"max_bytes": 1 << 20}
    assert total > 2 << 20
    with pytest.raises(DataError, match=r"max_bytes: 0\.00 GiB do not hold 0\.01 GiB of data"):
        outcome(run_of(paths, "s3://bucket/large", download=large), paths)
    assert not server.sent
    run = run_of(paths, "s3://bucket/large", download={**large, "stream": True})
    with (
        pytest.raises(DataError, match=r"max_bytes: .* but this command fetches all$"),
        run_pictures(run, paths),
    ):
        raise AssertionError
    outcome(run, paths)
    assert 0 < most[0] < 3 * PADDING
    assert left(paths) == []


def test_a_shard_larger_than_the_folder_is_refused_before_anything_is_sent(
    server: FileServer, roots: RunPaths, paths: RunPaths
) -> None:
    server.files["bucket/shards/huge.tar"] = bytes(1 << 20)
    run = run_of(paths, SHARDS, download={"max_bytes": 1 << 20, "stream": True})
    text = (
        r"max_bytes: 0\.00 GiB do not hold huge\.tar of s3://bucket/shards, which takes 0\.00 GiB"
    )
    for begin in (check_pictures, outcome):
        with pytest.raises(DataError, match=rf"^spec\.run\.data\.download\.{text}"):
            begin(run, paths)
    assert not server.sent


def test_a_failing_server_is_tried_again_and_a_shard_that_changes_is_refused(
    server: FileServer, paths: RunPaths
) -> None:
    run = run_of(paths, SHARDS, **STREAM)
    server.failures["bucket/shards/s-0.tar"] = 1
    server.cuts["bucket/shards/s-1.tar"] = [700]

    def change(path: str) -> None:
        if path.endswith("s-1.tar") and server.requests[path] == 3:
            server.change("bucket/shards/s-2.tar", b"x" * 5000)

    server.before = change
    with pytest.raises(ConfigError, match=r"s-2\.tar: it has changed since it was listed"):
        outcome(run, paths)
    server.before = lambda path: None
    with pytest.raises(ConfigError, match=r"got 's3://bucket/shards'; s-2\.tar: not a whole tar"):
        outcome(run, paths)
    server.denied.add("bucket/shards/s-0.tar")
    other = RunPaths(paths.output.parent / "other/out", paths.data, paths.models)
    with pytest.raises(ConfigError, match=r"s-0\.tar: access is denied") as caught:
        outcome(run_of(other, SHARDS, **STREAM), other)
    assert "\n" not in str(caught.value)


def test_a_server_that_fails_for_good_and_a_full_disk_end_the_run_in_a_line(
    server: FileServer, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(paths, SHARDS, download={"stream": True, "attempts": 1})
    server.failures["bucket/shards/s-1.tar"] = 1000
    with pytest.raises(DownloadError, match=r"s-1\.tar: .*the same command resumes"):
        outcome(run, paths)

    def full(path: Path, folder: Path, check: object, encoding: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fluxtrain.picture_cache.fetching.unpack", full)
    server.failures.clear()
    with pytest.raises(StorageError, match=r"node: No space left on device$"):
        outcome(run, paths)


def test_a_run_that_goes_on_streams_what_its_cache_lacks(
    server: FileServer, paths: RunPaths
) -> None:
    run = run_of(paths, SHARDS, **STREAM)
    expected = outcome(run, paths)
    before = encodings(paths.output)
    step = paths.output / CHECKPOINTS_FOLDER / "step_0000000001"
    step.mkdir(parents=True)
    (step / "DONE").write_text("")
    server.sent.clear()
    assert outcome(run, paths, is_new=False) == expected
    assert not server.sent
    next((paths.output / "cache/latents").glob("[!.]*")).unlink()
    assert outcome(run, paths, is_new=False) == expected
    assert encodings(paths.output) == before
    assert 0 < len(server.sent) <= 3
    server.sent.clear()
    work = cache(run_of(paths, SHARDS), paths, World.alone())
    assert server.sent  # each node fetches all of it
    assert (work.missing_pictures, work.missing_texts) == ([], [])
    server.change("bucket/shards/s-2.tar", bytes(10240))
    next((paths.output / "cache/latents").glob("[!.]*")).unlink()
    with pytest.raises(FluxtrainError, match="has changed since the run began, with 6 files"):
        outcome(run, paths, is_new=False)


def test_a_stopped_run_keeps_what_is_encoded_and_fetched(
    server: FileServer, paths: RunPaths
) -> None:
    run = run_of(paths, SHARDS, **STREAM)
    server.before = lambda path: time.sleep(0.1)
    together = partial(cache_together, port=free_port())
    (process,) = ranks.start(partial(asking, environment(server), together), run, paths)
    while process.is_alive() and not encodings(paths.output):
        time.sleep(0.01)
    assert process.is_alive(), ranks.output_of(paths)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 75, ranks.output_of(paths)
    assert "stopped; what is fetched is kept, the same command resumes" in ranks.output_of(paths)
    assert 0 < len(left(paths)) <= 2
    server.sent.clear()
    outcome(run, paths)
    assert len(server.sent) < 6
    assert left(paths) == []


def test_two_jobs_on_a_node_wait_for_room(
    server: FileServer, roots: RunPaths, tmp_path: Path
) -> None:
    padded(server, roots)
    both = [RunPaths(tmp_path / name / "out", roots.data, roots.models) for name in "ab"]
    download = {"folder": str(tmp_path / "node"), "max_bytes": 1 << 20, "stream": True}
    runs = [run_of(paths, "s3://bucket/large", download=download) for paths in both]
    together = [partial(asking, environment(server), partial(cache_together, port=free_port()))
                for _ in both]  # fmt: skip
    started = [ranks.start(*each) for each in zip(together, runs, both, strict=True)]
    for (process,) in started:
        process.join(120)
    assert [process.exitcode for (process,) in started] == [0, 0]
    assert encodings(both[0].output) == encodings(both[1].output)
    assert len(encodings(both[0].output)) > 9
    assert os.listdir(tmp_path / "node/entries") == []
