"""spec.storage: the volumes at the fixed paths /data, /models and /output."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from fluxtrain.contract.resource.part import Part, Quantity, Subdomain
from fluxtrain.contract.section import Rule


class PersistentVolumeClaim(Part):
    """A claim in the job's namespace."""

    claim_name: Subdomain
    """Name of the claim."""
    read_only: bool = False
    """Whether it is mounted read-only."""


class HostPath(Part):
    """A folder of the node; refused by restricted Pod Security."""

    rules: ClassVar = (
        Rule(
            "path",
            (),
            "must not go back by ..",
            lambda volume: ".." not in volume.path.split("/"),
            "!self.path.split('/').exists(part, part == '..')",
        ),
    )

    path: Annotated[
        str, Field(pattern=r"^/", max_length=1024, title="an absolute path, beginning with /")
    ]
    """Absolute path on the node."""


class EmptyDir(Part):
    """A folder that lives and dies with the pod."""

    size_limit: Quantity | None = None
    """Most bytes it may hold."""


_VOLUME_KINDS = ("persistentVolumeClaim", "hostPath", "emptyDir")


class Volume(Part):
    """Exactly one kind of volume."""

    rules: ClassVar = (
        Rule(
            "",
            (),
            f"exactly one of {', '.join(_VOLUME_KINDS)} must be set",
            lambda volume: sum(volume.look_up(kind) is not None for kind in _VOLUME_KINDS) == 1,
            f"{' + '.join(f'(has(self.{kind}) ? 1 : 0)' for kind in _VOLUME_KINDS)} == 1",
        ),
    )

    persistent_volume_claim: PersistentVolumeClaim | None = None
    """A claim."""
    host_path: HostPath | None = None
    """A folder of the node."""
    empty_dir: EmptyDir | None = None
    """A folder that lives and dies with the pod."""


class Storage(Part):
    """Volumes at the fixed paths /data, /models and /output; an empty folder where none is named."""

    data: Volume | None = None
    """Mounted at /data: the root of relative data paths."""
    models: Volume | None = None
    """Mounted at /models: the root of relative model paths."""
    output: Volume | None = None
    """Mounted at /output: checkpoints, logs and pictures; without one a lost pod loses them."""
