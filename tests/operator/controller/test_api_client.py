"""The resource label of the metric that counts API requests."""

from __future__ import annotations

import pytest

from fluxtrain_operator.controller.api_client import resource_of

PATHS = {
    "/api/v1/namespaces/team/pods": "pods",
    "/api/v1/namespaces/team/pods/job-0": "pods",
    "/api/v1/namespaces/team/configmaps?labelSelector=a%3Db": "configmaps",
    "/apis/fluxtrain.dev/v1alpha1/namespaces/t/fluxtrainings/x/status?fieldManager=y": (
        "fluxtrainings/status"
    ),
    "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies/n?force=true": "networkpolicies",
    "/apis/scheduling.volcano.sh/v1beta1": "",
    "/api/v1": "",
}


@pytest.mark.parametrize(("path", "resource"), PATHS.items())
def test_a_request_is_counted_by_its_resource(path: str, resource: str) -> None:
    assert resource_of(path) == resource
