"""Finished jobs: which config map of a job holds its resolved config. kubectl's answers are given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fluxtrain.errors import ConfigError
from fluxtrain.mlperf import campaign
from fluxtrain.mlperf import jobs as kubectl_calls

OWN = {"metadata": {"name": "job-0123"}, "data": {"config.json": "{}", "pods.json": "{}"}}
OTHER = {"metadata": {"name": "a"}, "data": {"other": ""}}
EMPTY = {"metadata": {"name": "b"}}


def config_of(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], answer: str) -> str:
    """Return the config of a job with ``status`` if kubectl gives ``answer``; check what it is asked."""

    def kubectl(namespace: str | None, *arguments: str) -> str:
        revision = status.get("revision")
        asked = ("configmap", revision) if revision else ("configmaps",)
        assert (namespace, arguments[: 1 + len(asked)]) == ("team", ("get", *asked))
        return answer

    for module in (campaign, kubectl_calls):
        monkeypatch.setattr(module, "kubectl", kubectl)
    job = {"metadata": {"name": "job"}, "status": {"phase": "Complete", **status}}
    return campaign._config(job, "team")


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        ({"revision": "job-0123"}, json.dumps(OWN)),
        ({}, json.dumps({"items": [OTHER, EMPTY, OWN]})),
    ],
    ids=["of its revision", "of an operator without revisions"],
)
def test_the_config_is_found(
    monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], answer: str
) -> None:
    assert config_of(monkeypatch, status, answer) == "{}"


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        ({"revision": "job-0123"}, ""),
        ({"revision": "job-0123"}, json.dumps(EMPTY)),
        ({}, json.dumps({"items": []})),
        ({}, json.dumps({"items": [OTHER, EMPTY]})),
    ],
    ids=["deleted", "emptied", "none", "others"],
)
def test_a_config_that_is_gone_is_an_error_with_the_jobs_name(
    monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], answer: str
) -> None:
    with pytest.raises(ConfigError, match="job: its config map is gone"):
        config_of(monkeypatch, status, answer)
