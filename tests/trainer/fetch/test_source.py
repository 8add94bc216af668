"""Data at URLs: listed, fetched, verified; the folder of the node: bounded, and right after any kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.trainer.fetch.servers import COMMIT, FileServer

from fluxtrain.errors import ConfigError, DataError, FluxtrainError, StorageError
from fluxtrain.fetch.http import DownloadError, RetryPolicy
from fluxtrain.fetch.node_cache import NodeCache
from fluxtrain.fetch.source import Source, fetch_source, list_source

pytestmark = pytest.mark.slow

FIELD = "spec.run.data.images"
PATIENCE = RetryPolicy(attempts=3, backoff=0.01)
FILES = {
    "a.png": b"a" * 1000,
    "below/b.png": b"b" * 3_000_000,
    "below/b.txt": b"a caption",
    "notes.md": b"not wanted",
}


def wanted(name: str) -> bool:
    return name.endswith((".png", ".txt", ".tar"))


def fill(server: FileServer, prefix: str) -> None:
    server.files |= {f"{prefix}/{name}": content for name, content in FILES.items()}


def fetched(source: Source, folder: Path, policy: RetryPolicy = PATIENCE) -> dict[str, bytes]:
    fetch_source(source, folder, 4, policy, lambda count: None)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert all(path.stat().st_mtime_ns == 0 for path in paths)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


URLS = {
    "s3": ("bucket/my pictures", "s3://bucket/my pictures"),
    "s3 with a slash": ("bucket/p", "s3://bucket/p/"),
    "a bucket": ("bucket", "s3://bucket"),
    "the Hub": ("datasets/owner/name", "hf://datasets/owner/name"),
    "a folder of the Hub": ("datasets/owner/name/train", "hf://datasets/owner/name/train"),
    "a commit": ("datasets/owner/name/train", f"hf://datasets/owner/name@{COMMIT}/train"),
}


@pytest.mark.parametrize("name", URLS)
def test_all_files_below_a_url_are_fetched(server: FileServer, tmp_path: Path, name: str) -> None:
    prefix, url = URLS[name]
    fill(server, prefix)
    source = list_source(FIELD, url, wanted, PATIENCE)
    expected = {name: content for name, content in FILES.items() if wanted(name)}
    assert {file.name: file.size for file in source.files} == {
        name: len(content) for name, content in expected.items()
    }
    assert fetched(source, tmp_path) == expected
    if url.startswith("hf"):
        assert source.pinned.startswith(f"hf://datasets/owner/name@{COMMIT}")
    again = list_source(FIELD, url, wanted, PATIENCE, source.pinned)
    assert again.key == source.key
    before = server.sent.copy()
    assert fetched(source, tmp_path) == expected
    assert server.sent == before  # nothing is sent again


def test_a_file_of_a_web_server_is_fetched(server: FileServer, tmp_path: Path) -> None:
    server.files["sets/p.tar"] = bytes(5000)
    source = list_source(FIELD, f"{server.url}/sets/p.tar?download=1", wanted, PATIENCE)
    assert fetched(source, tmp_path) == {"p.tar": bytes(5000)}


@pytest.mark.parametrize("scheme", ["s3", "hf", "http"])
def test_a_cut_connection_and_a_failing_server_are_tried_again(
    server: FileServer, tmp_path: Path, scheme: str
) -> None:
    content = bytes(range(256)) * 20_000
    at = {"s3": "bucket/p.tar", "hf": "datasets/owner/name/p.tar", "http": "p.tar"}[scheme]
    url = {"s3": f"s3://{at}", "hf": f"hf://{at}", "http": f"{server.url}/{at}"}[scheme]
    server.files[at] = content
    source = list_source(FIELD, url, wanted, PATIENCE)
    server.failures[at] = 1
    server.cuts[at] = [2_000_000]
    before = server.sent[at]
    assert fetched(source, tmp_path) == {"p.tar": content}
    if scheme == "http":
        assert (
            server.sent[at] - before < len(content) + len(content) // 2
        )  # continued where it was cut


def test_a_small_file_may_be_cut_often_if_each_try_gets_further(
    server: FileServer, tmp_path: Path
) -> None:
    content = bytes(range(256)) * 40
    server.files["p.tar"] = content
    source = list_source(FIELD, f"{server.url}/p.tar", wanted, PATIENCE)
    server.cuts["p.tar"] = [1000] * 9
    assert fetched(source, tmp_path) == {"p.tar": content}


def test_a_fetch_is_continued_by_the_next_process(server: FileServer, tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    server.files["bucket/p.tar"] = server.files["p.tar"] = content
    for url in ("s3://bucket/p.tar", f"{server.url}/p.tar"):
        folder = tmp_path / url[:2]
        folder.mkdir()
        source = list_source(FIELD, url, wanted, PATIENCE)
        (folder / "p.tar.partial").write_bytes(content[:4_000_000])
        before = server.sent.total()
        assert fetched(source, folder) == {"p.tar": content}
        assert server.sent.total() - before == len(content) - 4_000_000


@pytest.mark.parametrize("name", ["p.tar", "b.png"])
def test_what_the_hub_hashes_is_verified(server: FileServer, tmp_path: Path, name: str) -> None:
    at = f"datasets/owner/name/{name}"
    server.files[at] = bytes(1000)
    source = list_source(FIELD, "hf://datasets/owner/name", wanted, PATIENCE)
    (tmp_path / f"{name}.partial").write_bytes(b"x" * 500)
    assert fetched(source, tmp_path)[name] == bytes(1000)  # begun anew
    server.files[at] = b"y" * 1000
    with pytest.raises(
        DownloadError, match=r"images: hf://datasets/owner/name: .*its (SHA256|hash) is"
    ):
        fetched(source, tmp_path / "other")


@pytest.mark.parametrize("url", ["s3://bucket/p.tar", "http"])
def test_a_file_that_has_changed_since_it_was_listed_is_refused(
    server: FileServer, tmp_path: Path, url: str
) -> None:
    url = f"{server.url}/p.tar" if url == "http" else url
    for at in ("bucket/p.tar", "p.tar"):
        server.files[at] = bytes(5000)
    source = list_source(FIELD, url, wanted, PATIENCE)
    for at in ("bucket/p.tar", "p.tar"):
        server.change(at, b"x" * 5000)
    with pytest.raises(ConfigError, match=r"p\.tar: it has changed since it was listed"):
        fetched(source, tmp_path)
    assert list_source(FIELD, url, wanted, PATIENCE).key != source.key


DENIED = "access is denied, or it does not exist; credentials come from the environment"
REFUSED = {
    "no bucket": ("s3://nothing/here", "there is nothing of this name, or it is empty"),
    "no such file": ("s3://bucket/no.tar", "there is nothing of this name"),
    "a denied bucket": ("s3://secret/p", DENIED),
    "no data set": ("hf://datasets/owner/nothing", "there is nothing of this name"),
    "an empty folder of the Hub": ("hf://datasets/owner/name/test", "there is nothing of this"),
    "a denied data set": ("hf://datasets/secret/p", DENIED),
    "no page": ("URL/nothing.tar", "there is nothing of this name"),
    "a denied page": ("URL/secret/p.tar", DENIED),
    "other files": ("s3://bucket/text", "holds nothing that is read, only 1 other files"),
    "a name that leads out": ("s3://bucket/evil", "its name leads out of the folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_in_a_line(server: FileServer, name: str) -> None:
    url, message = REFUSED[name]
    server.files |= {"bucket/text/a.md": b"", "bucket/evil/../../b.png": b"", "bucket/a.png": b""}
    server.files["datasets/owner/name/train/a.png"] = b""
    server.denied |= {"secret", "api/datasets/secret"}
    with pytest.raises(ConfigError) as caught:
        list_source(FIELD, url.replace("URL", server.url), wanted, PATIENCE)
    said = str(caught.value)
    assert said.startswith(f"{FIELD}: got '")
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/p.tar", "http://no-such-host.invalid/p.tar", "s3://bucket/p"]
)
def test_an_unreachable_server_is_named_after_some_attempts(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DownloadError) as caught:
        list_source(FIELD, url, wanted, PATIENCE)
    assert str(caught.value).startswith(f"{FIELD}: {url}: ")
    assert str(caught.value).endswith("; tried 3 times")


def test_a_server_that_always_fails_is_given_up(server: FileServer, tmp_path: Path) -> None:
    server.files["bucket/p.tar"] = bytes(5000)
    source = list_source(FIELD, "s3://bucket/p.tar", wanted, PATIENCE)
    server.failures["bucket/p.tar"] = 1000
    with pytest.raises(DownloadError, match=r"p\.tar: .*tried 3 times; the same command resumes"):
        fetched(source, tmp_path)


def test_credentials_are_sent_and_never_written(
    server: FileServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fill(server, "datasets/owner/name")
    source = list_source(FIELD, "hf://datasets/owner/name", wanted, PATIENCE)
    fetched(source, tmp_path)
    assert "Bearer hf_secret" in server.authorizations
    server.denied.add("sets")
    with pytest.raises(FluxtrainError) as caught:
        list_source(FIELD, f"{server.url}/sets/p.tar?name=value", wanted, PATIENCE)
    said = f"{caught.value} {source} {source.pinned} {capfd.readouterr()}"
    assert "p.tar?***" in said
    assert "secret" not in said
    assert "name=value" not in said


def test_links_in_the_folder_lead_to_no_file_outside_of_it(
    server: FileServer, tmp_path: Path
) -> None:
    fill(server, "bucket/p")
    source = list_source(FIELD, "s3://bucket/p", wanted, PATIENCE)
    outside, folder = tmp_path / "outside", tmp_path / "set"
    for path in (outside, folder):
        path.mkdir()
    (outside / "mine").write_bytes(b"mine")
    (folder / "a.png.partial").symlink_to(outside / "mine")
    assert fetched(source, folder)["a.png"] == FILES["a.png"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "below").symlink_to(outside)
    with pytest.raises(ConfigError, match=r"below/b\..*: leads out of .* by a link; remove it"):
        fetched(source, tmp_path / "other")
    assert [path.read_bytes() for path in outside.iterdir()] == [b"mine"]


Fill = Callable[[Path], object]


def nothing() -> None: ...


def writer(size: int = 100) -> Fill:
    return lambda folder: (folder / "file").write_bytes(b"x" * size)


def put(cache: NodeCache, key: str, size: int = 100, fill: Fill | None = None) -> None:
    with cache.entry(key, size, fill or writer(size), nothing) as folder:
        assert (folder / "file").stat().st_size == size


def entries(cache: NodeCache) -> set[str]:
    return {path.name for path in (cache.folder / "entries").iterdir()}


def used_at(cache: NodeCache, key: str, seconds: int) -> None:
    os.utime(cache.folder / "entries" / key / "DONE", (seconds, seconds))


def refuse(folder: Path) -> None:
    raise AssertionError("it is there already")


def test_an_entry_is_filled_once(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "new", 1000)
    put(cache, "a")
    put(cache, "a", fill=refuse)


def test_the_least_recently_used_entries_make_room(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 300)
    for number, key in enumerate("abc"):
        put(cache, key)
        used_at(cache, key, 1000 + number)
    put(cache, "a", fill=refuse)  # used again
    put(cache, "d", 150)
    assert entries(cache) == {"a", "d"}
    put(cache, "b", 250)
    assert entries(cache) == {"b"}


def test_an_entry_that_is_read_is_not_removed(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 150)
    with cache.entry("a", 100, writer(), nothing):
        with pytest.raises(
            DataError, match=r"max_bytes: 0\.00 GiB do not hold .* beside 0\.00 GiB"
        ):
            put(cache, "b")
        assert entries(cache) == {"a"}
    put(cache, "b")
    assert entries(cache) == {"b"}


def test_more_than_the_bound_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^spec\.run\.data\.download\.max_bytes: "):
        put(NodeCache(tmp_path, 99), "a", 100, refuse)


def test_a_disk_that_is_too_small_is_named_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"the disk has .* GiB too little for the data; spec"):
        put(NodeCache(tmp_path, 1 << 62), "a", 1 << 60, refuse)


def test_what_a_failed_fill_left_is_continued(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 1000)

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise DataError("no")

    def finish(folder: Path) -> None:
        assert (folder / "half").exists()
        writer()(folder)

    with pytest.raises(DataError, match="no"):
        put(cache, "a", fill=fail)
    put(cache, "a", fill=finish)


def test_of_several_threads_one_fills(tmp_path: Path) -> None:
    cache, filled = NodeCache(tmp_path, 1000), list[int]()

    def fill(folder: Path) -> None:
        filled.append(1)
        time.sleep(0.1)
        writer()(folder)

    threads = [threading.Thread(target=put, args=(cache, "a", 100, fill)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert filled == [1]


def hang(folder: Path) -> None:
    """Fill the entry a without an end."""

    def fill(data: Path) -> None:
        (data / "half").touch()
        time.sleep(600)

    with NodeCache(folder, 1000).entry("a", 100, fill, nothing):
        pass


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=hang, args=(tmp_path,))
    process.start()
    cache, waited = NodeCache(tmp_path, 1000), list[int]()
    while not (tmp_path / "entries/a/data/half").exists():
        time.sleep(0.01)

    def check() -> None:
        waited.append(1)
        os.kill(process.pid or 0, signal.SIGKILL)

    with cache.entry("a", 100, writer(), check) as data:
        assert (data / "file").exists()
    process.join(30)
    assert waited


def test_room_that_another_uses_is_waited_for(tmp_path: Path) -> None:
    cache, said = NodeCache(tmp_path, 150), list[str]()
    with cache.entry("a", 100, writer(), nothing):
        cache.remove("a")  # it is read
        assert entries(cache) == {"a"}

        def fill() -> None:
            with cache.entry("b", 100, writer(), nothing, said.append) as folder:
                assert (folder / "file").exists()

        thread = threading.Thread(target=fill)
        thread.start()
        while not said:
            time.sleep(0.01)
    cache.remove("a")
    thread.join(60)
    assert entries(cache) == {"b"}
    assert "do not hold 0.00 GiB of data beside 0.00 GiB in use" in said[0]
    with (
        pytest.raises(DataError, match="do not hold"),  # it would never fit
        cache.entry("c", 151, refuse, nothing, said.append),
    ):
        raise AssertionError
    cache.remove("b")
    cache.remove("nothing")
    assert entries(cache) == set()
