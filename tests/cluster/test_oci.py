"""OCI archives: every digest is that of its blob."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

from cluster.nodes import oci

IMAGE = oci.Image("localhost/test/image:1", command=("/bin/true",), user="1000", env=("A=b",))


def make_archive(folder: Path) -> dict[str, bytes]:
    """Write an image of one file; return the archive's members."""
    (folder / "file").write_text("content")
    with tarfile.open(folder / "layer.tar", "w") as tar:
        tar.add(folder / "file", "file")
    oci.write_archive(IMAGE, folder / "layer.tar", folder / "image.tar")
    with tarfile.open(folder / "image.tar") as tar:
        members = {entry.name: tar.extractfile(entry) for entry in tar.getmembers()}
        return {name: stream.read() for name, stream in members.items() if stream}


def blob(members: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    """Return the blob of ``descriptor``, after verification."""
    digest = descriptor["digest"].removeprefix("sha256:")
    content = members[f"blobs/sha256/{digest}"]
    assert hashlib.sha256(content).hexdigest() == digest
    assert len(content) == descriptor["size"]
    return content


def test_the_index_references_the_layer_and_the_command(tmp_path: Path) -> None:
    members = make_archive(tmp_path)
    (entry,) = json.loads(members["index.json"])["manifests"]
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": IMAGE.name}
    manifest = json.loads(blob(members, entry))
    config = json.loads(blob(members, manifest["config"]))
    (layer,) = manifest["layers"]
    assert blob(members, layer) == (tmp_path / "layer.tar").read_bytes()
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]
    assert config["config"] == {"Cmd": ["/bin/true"], "User": "1000", "Env": ["A=b"]}


def test_no_partial_archive_remains(tmp_path: Path) -> None:
    make_archive(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("image*")) == ["image.tar"]
