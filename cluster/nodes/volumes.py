"""Volumes of host folders that restricted Pod Security allows, unlike hostPath volumes of pods."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from cluster.kubectl import Manifest

SITE_PACKAGES = "/opt/site-packages"
"""Mount path of the environment's packages, on the PYTHONPATH of the base image."""


def host_folder(name: str, folder: Path, namespace: str, *, read_only: bool) -> list[Manifest]:
    """Return a volume of ``folder`` and its claim ``name``; all nodes share the folder."""
    modes = ["ReadOnlyMany" if read_only else "ReadWriteMany"]
    size = {"storage": "1Gi"}  # required, not enforced
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
    """Return a read-only volume with the packages of this Python.

    torch with its libraries is 5 GB, too much for a test image; in production the base image has it. Both
    Pythons must have the same minor version.
    """
    return host_folder(name, Path(sysconfig.get_path("purelib")), namespace, read_only=True)
