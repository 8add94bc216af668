"""The job that `make cluster-images` writes is one that the operator takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.errors import MachineError
from cluster.kubectl import Kubectl
from cluster.nodes import checkout, volumes

from fluxtrain.contract.resource.fluxtraining import Spec


def test_the_small_job_mounts_the_packages_and_is_valid() -> None:
    spec = Spec.model_validate(checkout.job("small")["spec"])
    [container] = spec.model_dump(by_alias=True)["podTemplate"]["spec"]["containers"]
    assert container["volumeMounts"][0]["mountPath"] == volumes.SITE_PACKAGES


def test_images_are_loaded_into_no_cluster_of_somebody_else(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="another cluster: push the images"):
        checkout.load(Kubectl(tmp_path))
