"""Data sets of the Hugging Face Hub as stores, through its client's file system, which is one of fsspec's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fluxtrain.remote.client_errors import READ_BYTES, client_errors, stream_of
from fluxtrain.remote.http import ByteStream
from fluxtrain.remote.store import RemoteFile


@dataclass(frozen=True)
class HubStore:
    """The files at ``root``, such as ``datasets/owner/name@commit/folder``; they do not change."""

    filesystem: Any
    root: str

    def files(self) -> list[RemoteFile]:
        """Return all files in the order of their names."""
        with client_errors():
            found = self.filesystem.find(self.root, detail=True, refresh=True)
        files = [self._file(path, info) for path, info in found.items()]
        return sorted(files, key=lambda file: file.name)

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[ByteStream]:
        """Yield the bytes of ``file`` from ``offset`` on."""
        path = self.root if self.root.endswith(f"/{file.name}") else f"{self.root}/{file.name}"
        with client_errors():  # with its size, the client asks for no details of each file
            opened = self.filesystem.open(path, "rb", block_size=READ_BYTES, size=file.size)
        with stream_of(opened, offset, file.size) as stream:
            yield stream

    def _file(self, path: str, info: Mapping[str, Any]) -> RemoteFile:
        name = path.removeprefix(f"{self.root}/") if path != self.root else path.rpartition("/")[2]
        lfs, blob = info.get("lfs"), info.get("blob_id")
        digest = f"sha256:{lfs['sha256']}" if lfs else (f"git:{blob}" if blob else "")
        return RemoteFile(name, int(info["size"]), digest, digest)


def open_hub(path: str) -> HubStore:
    """Return the store of ``path``, ``datasets/owner/name@revision/folder``, at one commit.

    Without a revision, or with the name of a branch, it is the commit that there is now. Reads HF_TOKEN,
    HF_ENDPOINT and the client's other variables.
    """
    from huggingface_hub import HfApi, HfFileSystem

    kind, owner, rest = path.split("/", 2)
    given, _, below = rest.partition("/")
    name, _, revision = given.partition("@")
    with client_errors():
        commit = HfApi().dataset_info(f"{owner}/{name}", revision=revision or None).sha
        filesystem = HfFileSystem(skip_instance_cache=True)
    return HubStore(filesystem, f"{kind}/{owner}/{name}@{commit}/{below}".rstrip("/"))
