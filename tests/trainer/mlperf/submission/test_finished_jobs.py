"""Finished jobs: which config map of a job holds its resolved config. kubectl's answers are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import ConfigError
from fluxtrain.mlperf import campaign
from fluxtrain.mlperf import jobs as kubectl_calls

OWN = {"metadata": {"name": "job-0123"}, "data": {"config.json": "{}", "pods.json": "{}"}}
EMPTY = {"metadata": {"name": "b"}}


def config_of(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], answer: str) -> str:
    """Return the config of a job with ``status`` if kubectl gives ``answer``; check what it is asked."""

    def kubectl(namespace: str | None, *arguments: str) -> str:
        assert (namespace, arguments[:3]) == ("team", ("get", "configmap", "job-0123"))
        return answer

    for module in (campaign, kubectl_calls):
        monkeypatch.setattr(module, "kubectl", kubectl)
    job = {"metadata": {"name": "job"}, "status": {"phase": "Complete", **status}}
    return campaign._config(job, "team")


def test_the_config_is_that_of_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(monkeypatch, {"revision": "job-0123"}, json.dumps(OWN)) == "{}"


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        ({"revision": "job-0123"}, ""),
        ({"revision": "job-0123"}, json.dumps(EMPTY)),
    ],
    ids=["deleted", "emptied"],
)
def test_a_config_that_is_gone_is_an_error_with_the_jobs_name(
    monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], answer: str
) -> None:
    with pytest.raises(ConfigError, match="job: its config map is gone"):
        config_of(monkeypatch, status, answer)


def test_a_machine_without_a_cluster_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = 'E1128 memcache.go:265] "Unhandled Error" err="Get http://localhost:8080/api: refused"'
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError) as caught:
        kubectl_calls.kubectl(None, "get", "fluxtrainings")
    assert str(caught.value) == "kubectl: has no kubeconfig, so no API server; set KUBECONFIG"
