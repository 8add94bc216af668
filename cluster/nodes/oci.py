"""Write an image of one layer as an OCI archive, which containerd and buildah both read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

MEDIA_TYPE = "application/vnd.oci.image"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
BLOCK = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class Image:
    """An image: its full name and the defaults of its containers."""

    name: str
    command: tuple[str, ...]
    user: str = "65532"
    env: tuple[str, ...] = field(default=("PATH=/usr/local/bin:/usr/bin:/bin",))


def write_archive(image: Image, layer: Path, archive: Path) -> None:
    """Write ``archive`` atomically from ``layer``, a tar of the root file system.

    Uncompressed, since it is read on the same machine.
    """
    layer_digest = _digest(layer)
    config = _encoded(_config(image, layer_digest))
    manifest = _encoded(_manifest(config, layer_digest, layer.stat().st_size))
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        _add(tar, "oci-layout", _encoded({"imageLayoutVersion": "1.0.0"}))
        _add(tar, "index.json", _encoded(_index(image, manifest)))
        for blob in (config, manifest):
            _add(tar, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
        tar.add(layer, f"blobs/sha256/{layer_digest}")
    partial.rename(archive)


def _config(image: Image, layer_digest: str) -> dict[str, object]:
    process = {"Cmd": list(image.command), "User": image.user, "Env": list(image.env)}
    return {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": process,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        # one per layer, or buildah caches none of its layers
        "history": [{"created_by": "cluster"}],
    }


def _manifest(config: bytes, layer_digest: str, layer_bytes: int) -> dict[str, object]:
    layer = {
        "mediaType": f"{MEDIA_TYPE}.layer.v1.tar",
        "digest": f"sha256:{layer_digest}",
        "size": layer_bytes,
    }
    return {
        "schemaVersion": 2,
        "mediaType": f"{MEDIA_TYPE}.manifest.v1+json",
        "config": _descriptor("config", config),
        "layers": [layer],
    }


def _index(image: Image, manifest: bytes) -> dict[str, object]:
    names = {"org.opencontainers.image.ref.name": image.name}
    return {
        "schemaVersion": 2,
        "manifests": [{**_descriptor("manifest", manifest), "annotations": names}],
    }


def _descriptor(kind: str, blob: bytes) -> dict[str, object]:
    return {
        "mediaType": f"{MEDIA_TYPE}.{kind}.v1+json",
        "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}",
        "size": len(blob),
    }


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
