"""What is odd in a source: used, left out with its reason, or refused in a line; streamed or not."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.trainer.data.formats.tar_files import tar
from tests.trainer.fetch.servers import FileServer
from tests.trainer.picture_cache.folders import cache, file_of, noise
from tests.trainer.picture_cache.remote.remote_pictures import run_of

from fluxtrain.contract.process import RunPaths
from fluxtrain.errors import FluxtrainError
from fluxtrain.parallel.distributed import World
from fluxtrain.picture_cache.stage import check_pictures

pytestmark = pytest.mark.slow


def png(number: int) -> bytes:
    return file_of(noise(40, 40, seed=number), "PNG")


def table(rows: list[dict[str, Any]]) -> bytes:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", image), ("text", pa.string())])
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), buffer, row_group_size=1)
    return buffer.getvalue()


def row(number: int, text: str | None) -> dict[str, Any]:
    return {"image": {"bytes": png(number), "path": "p"}, "text": text}


ONE = tar(("x.png", png(1)), ("x.txt", b"one"))
AT = "s3://bucket/set"
USED: dict[str, tuple[dict[str, bytes], dict[str, str], dict[str, str]]] = {
    "an empty shard": (
        {"a.tar": bytes(10240), "b.tar": ONE},
        {"b/x.png": "one"},
        {"a/": "holds no pictures"},
    ),
    "one sample without a caption": ({"a.tar": tar(("x.png", png(1)))}, {"a/x.png": ""}, {}),
    "one key twice in a shard": (
        {"a.tar": tar(("x.png", png(1)), ("x.txt", b"1"), ("x.png", png(2)), ("x.txt", b"2"))},
        {"a/x.png": "1"},
        {"a/'x.png'": "there are several of this name", "a/'x.txt'": "there are several of this"},
    ),
    "one key in two shards": (
        {"a.tar": ONE, "b.tar": tar(("x.png", png(2)), ("x.txt", b"two"))},
        {"a/x.png": "one", "b/x.png": "two"},
        {},
    ),
    "names": (
        {"s 1%20é.tar": tar(("k 猫%.png", png(1)), ("k 猫%.txt", b"one"))},
        {"s 1%2520%C3%A9/k 猫%.png": "one"},
        {},
    ),
    "dots in names": (
        {"a.tar": tar(("x.png", png(1)), ("y.v2.png", png(2)), ("._x.png", b"of a Mac"))},
        {"a/x.png": ""},
        {"a/'y.v2.png'": "a sample's name ends at its first dot, so this is its part .v2.png"},
    ),
    "tables": (
        {"a.parquet": table([]), "b.parquet": table([row(1, "a"), row(2, None), row(3, "")])},
        {"b/00000000.png": "a", "b/00000001.png": "", "b/00000002.png": ""},
        {"a/": "holds no pictures"},
    ),
    "a picture and a folder of one name": (
        {"cats.png": png(1), "cats/1.png": png(2)},
        {"cats.png": "", "cats/1.png": ""},
        {},
    ),
}
REFUSED: dict[str, tuple[dict[str, bytes], str]] = {
    "no shards": ({"readme.md": b""}, "holds nothing that is read, only 1 other files, such as readme.md"),
    "nothing": ({}, "there is nothing of this name, or it is empty"),
    "only empty shards": ({"a.tar": bytes(10240)}, "can be used; a/: holds no pictures"),
    "only empty tables": ({"a.parquet": table([])}, "can be used; a/: holds no pictures"),
    "a shard of no bytes": ({"a.tar": b"", "b.tar": ONE}, "a.tar: not a whole tar (it is empty)"),
    "a compressed shard": ({"a.tar": gzip.compress(ONE)}, "it is compressed with gzip"),
    "a compressed shard by name": ({"a.tar.gz": b""}, "compressed shards are not read: unpack them"),
    "one folder for two": ({"a.tar": ONE, "a.TAR": ONE}, "a.TAR and a.tar differ in their suffix only"),
    "metadata": (
        {"a.png": png(1), "metadata.jsonl": b'{"file_name": "a.png", "text": 3}'},
        f"{AT}/metadata.jsonl: row 1: text is 3, not a text",
    ),
}  # fmt: skip


def outcome(run: Any, paths: RunPaths) -> tuple[dict[str, str], dict[str, str]]:
    """Return the captions of the pictures that are used, and what is left out, with the reason."""
    check_pictures(run, paths)
    work = cache(run, paths, World.alone())
    found = work.open(run, paths.output).train
    report = json.loads((paths.output / "pictures.json").read_text())
    return {entry.name: entry.captions[0] for entry in found.entries}, report["skipped"]


Runs = list[tuple[Any, RunPaths]]


@pytest.fixture
def runs(roots: RunPaths, tmp_path: Path) -> Callable[[str], Runs]:
    """Return two runs, of which the second streams its pictures."""

    def make(url: str) -> Runs:
        found = []
        for name, streams in (("a", False), ("b", True)):
            paths = RunPaths(tmp_path / name / "out", roots.data, roots.models)
            download = {"stream": streams, "attempts": 1}
            found.append((run_of(paths, url, download=download), paths))
        return found

    return make


@pytest.mark.parametrize("name", USED)
def test_it_is_used_and_what_is_left_out_is_named(
    server: FileServer, runs: Callable[[str], Runs], name: str
) -> None:
    files, used, skipped = USED[name]
    server.files |= {f"bucket/set/{at}": content for at, content in files.items()}
    for run, paths in runs(AT):
        captions, reasons = outcome(run, paths)
        assert captions == used
        assert reasons.keys() == skipped.keys()
        assert all(reasons[at].startswith(reason) for at, reason in skipped.items())


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_line(
    server: FileServer, runs: Callable[[str], Runs], name: str
) -> None:
    files, message = REFUSED[name]
    server.files |= {f"bucket/set/{at}": content for at, content in files.items()}
    for run, paths in runs(AT):
        with pytest.raises(FluxtrainError) as caught:
            outcome(run, paths)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_shards_beside_pictures_are_told_not_to_be_read(
    server: FileServer, runs: Callable[[str], Runs], capfd: pytest.CaptureFixture[str]
) -> None:
    server.files |= {"bucket/set/a.png": png(1), "bucket/set/b.tar": ONE, "bucket/set/c.tar": ONE}
    for run, paths in runs(AT):
        assert outcome(run, paths)[0] == {"a.png": ""}
        said = capfd.readouterr().err
        assert (
            said.count(f"{AT}: b.tar and 1 more files are not read, as there are pictures too") == 1
        )


def test_web_servers(
    server: FileServer, runs: Callable[[str], Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    get = server.RequestHandlerClass.do_GET  # type: ignore[attr-defined]

    def redirect(handler: Any) -> None:
        targets = {"/go/a.tar": f"{other.url}/x/a.tar", "/loop/a.tar": "/loop/a.tar"}
        if (target := targets.get(handler.path)) is None:
            get(handler)
        else:
            handler._answer(302, b"", Location=target)

    monkeypatch.setattr(server.RequestHandlerClass, "do_GET", redirect)
    server.files["web/s 1é.tar"] = ONE
    with FileServer({"x/a.tar": ONE}) as other:
        for run, paths in runs(f"{server.url}/go/a.tar"):  # another host
            assert outcome(run, paths)[0] == {"a/x.png": "one"}
    for run, paths in runs(f"{server.url}/web/s 1é.tar"):
        assert outcome(run, paths)[0] == {"s 1%C3%A9/x.png": "one"}
    for at, message in (("loop/a.tar", "infinite loop"), ("web/", "a web server lists no folders")):
        with pytest.raises(FluxtrainError, match=message) as caught:
            outcome(*runs(f"{server.url}/{at}")[0])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shorter", [True, False])
def test_a_shard_that_shrinks_after_it_was_listed_is_refused(
    server: FileServer, runs: Callable[[str], Runs], shorter: bool
) -> None:
    whole = tar(*((f"{number}.png", png(number)) for number in range(4)))
    for run, paths in runs(f"{server.url}/web/shrinks.tar"):
        at = "web/shrinks.tar"
        server.files[at] = whole
        check_pictures(run, paths)
        begun = server.requests[at]

        def shrink(path: str, at: str = at, begun: int = begun) -> None:
            if path == at and server.requests[at] == begun + 2:  # after it was listed again
                server.files[at] = whole[:900] if shorter else ONE
                server.versions[at] += not shorter  # with the same ETag, or another one

        server.before = shrink
        with pytest.raises(
            FluxtrainError, match=r"shrinks\.tar: it has changed since it was listed"
        ):
            cache(run, paths, World.alone())
