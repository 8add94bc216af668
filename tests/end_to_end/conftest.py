"""One cluster for all tests of this folder, with our CRD and the trainer's image."""

from __future__ import annotations

import os
from collections.abc import Iterator

import cluster
import pytest
from cluster.errors import ClusterError, MachineError
from cluster.layout import KUBECONFIG
from cluster.nodes import images
from tests.api_server.client import Kubectl
from tests.end_to_end import trainer_image
from tests.paths import ROOT

NUM_NODES, NODE_GRACE_SECONDS = 3, 20


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
    images.load([trainer_image.build(tmp_path_factory.mktemp("image"))])
    crd = f"--filename={ROOT / 'manifests' / 'crd.yaml'}"
    empty_cluster("apply", "--server-side", "--force-conflicts", crd)
    empty_cluster.wait_for_crds()
    return empty_cluster
