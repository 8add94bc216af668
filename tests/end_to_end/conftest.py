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
from cluster.layout import KUBECONFIG
from tests.api_server.client import Kubectl
from tests.end_to_end.stage import IMAGE
from tests.paths import ROOT

NUM_NODES, NODE_GRACE_SECONDS = 3, 20
HERE = Path(__file__).parent
FILES = {
    "bin/fluxtrain": '#!/bin/sh\nexec /usr/bin/python3 -m fluxtrain.cli "$@"\n',
    "slow_steps-1.dist-info/entry_points.txt": "[torch.backends]\nslow = slow_steps:install\n",
}


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.timeout(1500))  # the first start builds Kubernetes


@pytest.fixture(scope="session")
def empty_cluster() -> Iterator[Kubectl]:
    """Return kubectl for a cluster, which is removed at the end if it did not run before."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for the cluster's nodes")
    if "KUBECONFIG" in os.environ:
        pytest.skip("KUBECONFIG is set: images cannot be loaded into an existing cluster")
    created = not KUBECONFIG.exists()
    try:
        cluster.prepare()
    except ClusterError as error:
        pytest.skip(f"the cluster cannot be prepared here: {error}")
    try:
        kubectl = Kubectl(cluster.up(NUM_NODES, NODE_GRACE_SECONDS))
    except MachineError as error:
        pytest.skip(f"no cluster can run here: {error}")
    yield kubectl
    kubectl.server.close()
    if created:
        cluster.down()


@pytest.fixture(scope="session")
def kubectl(empty_cluster: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    """Return kubectl for the cluster with our CRD and the trainer's image."""
    context = tmp_path_factory.mktemp("image")
    write_context(context)
    dockerfile = HERE / "trainer.Dockerfile"
    images.load([images.build(IMAGE, dockerfile, context, {"BASE": images.BASE_IMAGE})])
    crd = f"--filename={ROOT / 'manifests' / 'crd.yaml'}"
    empty_cluster("apply", "--server-side", "--force-conflicts", crd)
    empty_cluster.wait_for_crds()
    return empty_cluster


def write_context(folder: Path) -> None:
    """Write the files that `trainer.Dockerfile` copies."""
    without_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "trainer" / "fluxtrain", folder / "fluxtrain", ignore=without_caches)
    shutil.copy(HERE / "slow_steps.py", folder)
    for path, text in FILES.items():
        (folder / path).parent.mkdir()
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
