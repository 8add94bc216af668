"""An API server without nodes and controllers, with our CRD: for tests of requests, and of the operator."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cluster.errors import ClusterError
from cluster.programs import binaries
from tests.api_server.client import Kubectl
from tests.api_server.empty_api_server import api_server


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.timeout(1500))  # the first start builds Kubernetes


@pytest.fixture(scope="session")
def programs() -> None:
    """Build the API server, etcd, kubectl and helm, if they are not cached."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for the cluster's programs")
    try:
        for module in ("kubernetes", "etcd"):
            binaries.build(module)
        binaries.tools()
    except ClusterError as error:
        pytest.skip(f"the programs cannot be built here: {error}")


@pytest.fixture(scope="session")
def kubectl(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """Return kubectl for an API server with our CRD."""
    with api_server(tmp_path_factory.mktemp("api_server")) as kubectl:
        yield kubectl
