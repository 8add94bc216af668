"""The node's folder of fetched data: bounded, shared by processes, and right after any of them is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.errors import DataError, StorageError
from fluxtrain.fetch.node_cache import NodeCache

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
