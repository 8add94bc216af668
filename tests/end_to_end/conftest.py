"""One cluster for all tests of this folder, with our CRD and the trainer's image."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import cluster
import pytest
from cluster import images
from cluster.errors import ClusterError, MachineError
from cluster.kubectl import Kubectl
from cluster.layout import KUBECONFIG
from tests.end_to_end.stage import IMAGE
from tests.paths import ROOT

NUM_NODES = 3
COMMAND = """#!/bin/sh
exec {python} -m fluxtrain.cli "$@"
"""


@pytest.fixture(scope="session")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """Return kubectl for a cluster with our CRD and the trainer's image."""
    if "KUBECONFIG" in os.environ:
        pytest.skip("KUBECONFIG is set: images cannot be loaded into an existing cluster")
    created = not KUBECONFIG.exists()
    try:
        cluster.prepare()
    except ClusterError as error:
        pytest.skip(f"the cluster cannot be prepared here: {error}")
    try:
        kubectl = Kubectl(cluster.up(NUM_NODES))
    except MachineError as error:
        pytest.skip(f"no cluster can run here: {error}")
    context = tmp_path_factory.mktemp("image")
    shutil.copytree(ROOT / "trainer" / "fluxtrain", context / "fluxtrain")
    (context / "bin").mkdir()
    program = context / "bin" / "fluxtrain"
    program.write_text(COMMAND.format(python="/usr/bin/python3"))
    program.chmod(0o755)
    dockerfile = Path(__file__).parent / "trainer.Dockerfile"
    images.load([images.build(IMAGE, dockerfile, context, {"BASE": images.BASE_IMAGE})])
    crd = f"--filename={ROOT / 'manifests' / 'crd.yaml'}"
    kubectl("apply", "--server-side", "--force-conflicts", crd)
    kubectl("wait", "--for=condition=Established", "crd/fluxtrainings.fluxtrain.dev")
    yield kubectl
    if created:
        cluster.down()
