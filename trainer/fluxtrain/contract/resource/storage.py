"""spec.storage: the volumes mounted at /data, /models and /output."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from fluxtrain.contract.resource.api_model import ApiModel, Quantity, Subdomain
from fluxtrain.contract.strict_model import Rule

_PART = "[A-Za-z0-9][A-Za-z0-9._-]*"
OutputFolder = Annotated[
    str,
    Field(
        pattern=f"^{_PART}(/{_PART})*$",
        max_length=253,
        title="a relative path of letters, digits, '.', '_', '-' and '/', such as july/run-03",
    ),
]


class PersistentVolumeClaim(ApiModel):
    """A PersistentVolumeClaim in the job's namespace."""

    claim_name: Subdomain
    """Name of the claim."""
    read_only: bool = False
    """Mount it read-only."""


class HostPath(ApiModel):
    """A folder of the node; Pod Security's baseline and restricted levels refuse it."""

    rules: ClassVar = (
        Rule(
            "path",
            "must not contain '..', '.' or '//': patterns of allowed paths compare it as it is",
            lambda volume: (
                "//" not in volume.path and not {".", ".."}.intersection(volume.path.split("/"))
            ),
            "!self.path.contains('//') && !self.path.split('/').exists(part, part == '..' || part == '.')",
        ),
    )

    path: Annotated[
        str, Field(pattern=r"^/", max_length=1024, title="an absolute path, beginning with /")
    ]
    """Absolute path on the node."""


class EmptyDir(ApiModel):
    """An empty folder that is deleted with the pod."""

    size_limit: Quantity | None = None
    """Maximum size."""


_VOLUME_KINDS = ("persistentVolumeClaim", "hostPath", "emptyDir")


class Volume(ApiModel):
    """Exactly one kind of volume."""

    rules: ClassVar = (
        Rule(
            "",
            f"exactly one of {', '.join(_VOLUME_KINDS)} must be set",
            lambda volume: sum(volume.look_up(kind) is not None for kind in _VOLUME_KINDS) == 1,
            f"{' + '.join(f'(has(self.{kind}) ? 1 : 0)' for kind in _VOLUME_KINDS)} == 1",
        ),
    )

    persistent_volume_claim: PersistentVolumeClaim | None = None
    """A PersistentVolumeClaim."""
    host_path: HostPath | None = None
    """A folder of the node."""
    empty_dir: EmptyDir | None = None
    """An empty folder that is deleted with the pod."""


class Storage(ApiModel):
    """Volumes mounted at /data, /models and /output; an emptyDir for each that is not set."""

    data: Volume | None = None
    """Mounted at /data, read-only but for prepare and preprocess, and for a data.cache in it: the root of
    relative data paths."""
    models: Volume | None = None
    """Mounted at /models, read-only: the root of relative model paths."""
    output: Volume | None = None
    """Mounted at /output: checkpoints, logs and images; if unset, they are lost with the pod."""
    output_folder: OutputFolder | None = None
    """Folder in the output volume that the job writes to, so that several jobs share a volume; created if it
    is missing; if unset, the volume's root."""
    isolated: bool = False
    """Mount only the folder NAMESPACE/NAME of the output volume at /output, as a ``subPath`` that the kubelet
    creates: a program of the job cannot reach the results of other jobs. ``outputFolder`` is within it."""
