"""The key of a run is readable by its owner only, and is waited for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fluxtrain.errors import StorageError
from fluxtrain.rendezvous.messages import create_key, wait_for_key


def test_a_key_is_created_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = create_key(path)
    assert len(key) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert create_key(path) == wait_for_key(path, 0) == key
    assert create_key(tmp_path / "another") != key
    assert sorted(file.name for file in tmp_path.iterdir()) == ["another", "key"]


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "key.partial").write_text("half")
    assert len(create_key(tmp_path / "key")) == 64
    assert not (tmp_path / "key.partial").exists()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604])
def test_a_key_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    create_key(path)
    path.chmod(mode)
    expected = f"mode {mode:04o}; must be yours with mode 0600: remove it"
    with pytest.raises(StorageError, match=expected):
        create_key(path)
    with pytest.raises(StorageError, match=expected):
        wait_for_key(path, 0)


def test_a_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for content in (b"", b"short", b"x" * 65):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(StorageError, match="is no key of a rendezvous"):
            create_key(path)


def test_a_link_to_another_file_is_refused(tmp_path: Path) -> None:
    create_key(tmp_path / "target")
    (tmp_path / "key").symlink_to(tmp_path / "target")
    with pytest.raises(StorageError, match="cannot be read"):
        create_key(tmp_path / "key")


def test_a_key_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "key"
    timer = threading.Timer(0.3, create_key, [path])
    timer.start()
    key = wait_for_key(path, 20)
    timer.join()
    assert key == path.read_bytes()


def test_a_key_that_does_not_come_is_named_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"absent for 0 s: .* the same on all nodes\?"):
        wait_for_key(tmp_path / "absent" / "key", 0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/key: cannot be created \(Not a directory\)"):
        create_key(tmp_path / "file" / "key")
