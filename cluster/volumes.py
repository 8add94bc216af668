"""Folders of this machine as volumes for pods: allowed under restricted Pod Security, unlike hostPath."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from cluster.kubectl import Manifest

SITE_PACKAGES = "/opt/site-packages"
"""Where a pod mounts the environment's packages; PYTHONPATH of the base image points here."""


def host_folder(name: str, folder: Path, namespace: str, *, read_only: bool) -> list[Manifest]:
    """Return a volume of ``folder`` and the claim of this ``name`` that gets it.

    All nodes see the folder, for they are one machine.
    """
    modes = ["ReadOnlyMany" if read_only else "ReadWriteMany"]
    size = {"storage": "1Gi"}  # must be said, and binds nobody
    volume_name = f"{namespace}-{name}"
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name},
        "spec": {
            "accessModes": modes,
            "capacity": size,
            "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": name},
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "accessModes": modes,
            "storageClassName": "",
            "volumeName": volume_name,
            "resources": {"requests": size},
        },
    }
    return [volume, claim]


def site_packages(name: str, namespace: str) -> list[Manifest]:
    """Return a read-only volume with the packages of the Python that runs this.

    torch with its libraries is 5 GB: too much to copy into an image for a test. In production the
    base image brings it. Both Pythons must have the same minor version.
    """
    return host_folder(name, Path(sysconfig.get_path("purelib")), namespace, read_only=True)
