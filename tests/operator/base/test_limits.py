"""What the policy permits: each profile's table, and the errors' paths."""

from __future__ import annotations

import re

import pytest
from tests.operator.jobs import make_job, make_training
from tests.operator.object_store import Harness, run
from tests.operator.permissions import PROFILES, ROWS, Row, policy_of
from tests.paths import ROOT

from fluxtrain.errors import ConfigError
from fluxtrain_operator.base.errors import NotPermittedError
from fluxtrain_operator.base.limits import require_permitted
from fluxtrain_operator.base.settings import DEFAULT_POLICY, JobPolicy, parse_job_policy
from fluxtrain_operator.planner.plan import load


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.what}-{ROWS.index(row)}")
def test_a_profile_permits_what_its_table_says(row: Row, profile: str) -> None:
    manifest, policy = make_training(row.spec), policy_of(profile)
    if profile in row.permitted:
        load(manifest, "trainer", policy=policy)
        return
    with pytest.raises(NotPermittedError) as refusal:
        load(manifest, "trainer", policy=policy)
    if row.at and policy.pod_template != "none":
        assert refusal.value.path == row.at
        assert str(refusal.value).startswith(f"{row.at}: ")


def test_a_refused_job_gets_no_objects_and_a_condition_with_the_path() -> None:
    template = {
        "spec": {"containers": [{"name": "trainer", "securityContext": {"privileged": True}}]}
    }
    job = make_job()
    harness = Harness(spec={**job["spec"], "podTemplate": template})
    run(harness, 2)
    status, reason, message = harness.cluster.condition("Failed")
    assert (status, reason) == ("True", "NotPermitted")
    path = "spec.podTemplate.spec.containers[0].securityContext.privileged"
    assert message == f"{path}: got true; must be false"
    assert not harness.cluster.objects


def test_a_running_job_keeps_its_pods_when_the_policy_becomes_stricter() -> None:
    job = make_job()
    harness = Harness(spec={**job["spec"], "network": {"mode": "Host"}})
    harness.reconciler.job_policy = policy_of("trusted")
    run(harness, 2)
    pods = harness.cluster.own("Pod")
    assert len(pods) == 5
    harness.set_job(
        {
            **job,
            "spec": {**job["spec"], "network": {"mode": "Host"}},
            "status": harness.cluster.status,
        }
    )
    harness.reconciler.job_policy = DEFAULT_POLICY
    harness.reconciler._jobs.clear()  # as after a restart of the operator
    harness.sync()
    run(harness, 2)
    assert harness.cluster.condition("Healthy")[:2] == ("False", "NotPermitted")
    assert harness.cluster.own("Pod") == pods


def documented() -> dict[str, set[str]]:
    """Return the profiles that permit something, by its words in the table of docs/operator.md."""
    result = {}
    for line in (ROOT / "docs" / "operator.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and set(cells[1:]) <= {"yes", "no"}:
            cell = re.sub("`", "", cells[0])
            result[cell] = {
                name for name, yes in zip(PROFILES, cells[1:], strict=True) if yes == "yes"
            }
    return result


def test_the_docs_have_the_table() -> None:
    assert documented() == {row.what: set(row.permitted) for row in ROWS}


def test_the_operators_default_is_the_charts() -> None:
    assert policy_of("default") == DEFAULT_POLICY == parse_job_policy("")


@pytest.mark.parametrize(
    ("patterns", "value", "allowed"),
    [
        (["*"], "anything", True),
        ([], "anything", False),
        ([], "", False),
        (["*"], "", True),
        (["*", "!a"], "", False),
        (["*", "!a"], "ab", True),
        (["*", "!a*"], "ab", False),
        (["!a*", "*"], "ab", False),
        (["example.com/team/*"], "example.com/team/own:1", True),
        (["example.com/team/*"], "example.com/teams/own:1", False),
        (["example.com/a"], "example.com/a:1", False),
        (["*"], 7, False),
    ],
)
def test_a_value_is_allowed_by_a_pattern_and_no_excluding_one(
    patterns: list[str], value: object, allowed: bool
) -> None:
    assert JobPolicy(images=patterns).allows("images", value) == allowed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "jobs: got '{'; must be JSON"),
        ('{"podTemplate": "some"}', "jobs.podTemplate: got 'some'"),
        ('{"images": ["a*b"]}', "jobs.images[0]: got 'a*b'"),
        ('{"image": []}', "jobs.image"),
    ],
)
def test_a_wrong_policy_is_refused_with_its_path(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_job_policy(text)


@pytest.mark.parametrize(
    "spec",
    [
        {"podTemplate": {"spec": {"securityContext": "root"}}},
        {"podTemplate": {"spec": {"affinity": {"podAntiAffinity": []}}}},
        {"podTemplate": {"spec": {"volumes": {"a": 1}}}},
        {
            "podTemplate": {
                "spec": {"containers": [{"name": "a", "securityContext": {"capabilities": 1}}]}
            }
        },
        {"podTemplate": {"spec": {"securityContext": {"runAsUser": "0"}}}},
        {"podTemplate": {"spec": {"nodeSelector": ["a"]}}},
        {
            "podTemplate": {
                "spec": {
                    "containers": [
                        {
                            "name": "a",
                            "securityContext": {
                                "allowPrivilegeEscalation": False,
                                "capabilities": {"drop": "ALL"},
                            },
                        }
                    ]
                }
            }
        },
    ],
)
def test_a_value_of_another_type_is_refused(spec: dict[str, object]) -> None:
    with pytest.raises(NotPermittedError):
        require_permitted({"spec": spec}, DEFAULT_POLICY)


def _with_secret(name: str) -> list[dict[str, object]]:
    volumes = [
        {"secret": {"secretName": name}},
        {"projected": {"sources": [{"secret": {"name": name}}]}},
        {"csi": {"driver": "a", "nodePublishSecretRef": {"name": name}}},
    ]
    containers = [
        {"envFrom": [{"secretRef": {"name": name}}]},
        {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": name, "key": "k"}}}]},
    ]
    pods = [
        *({"volumes": [{"name": "v", **each}]} for each in volumes),
        *(
            {kind: [{"name": "c", **each}]}
            for kind in ("containers", "initContainers")
            for each in containers
        ),
    ]
    return [{"credentials": [name]}, *({"podTemplate": {"spec": pod}} for pod in pods)]


@pytest.mark.parametrize("number", range(len(_with_secret(""))))
def test_every_way_to_a_secret_needs_its_pattern(number: int) -> None:
    policy = JobPolicy.model_validate({"podTemplate": "any", "secrets": ["hub-*", "!hub-admin"]})
    require_permitted({"spec": _with_secret("hub-token")[number]}, policy)
    for name in ("hub", "other", "hub-admin"):
        with pytest.raises(NotPermittedError, match=r"must be allowed by jobs\.secrets"):
            require_permitted({"spec": _with_secret(name)[number]}, policy)
