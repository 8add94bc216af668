"""Object names have at most 63 characters, are distinct, and valid for their kind."""

from __future__ import annotations

import re

import pytest

from fluxtrain_operator.base import names

LONG = "a" * 63
MAKERS = (
    lambda job: names.pod(job, 0),
    lambda job: names.pod(job, 4095),
    names.rendezvous,
    lambda job: names.rendezvous(job, 2),
    names.service,
    lambda job: names.revision(job, "0123456789abcdef"),
    names.network_policy,
    names.disruption_budget,
    names.pod_group,
    lambda job: names.native_group(job, 4096),
    lambda job: names.kueue_group(job, 12),
)


@pytest.mark.parametrize(
    "job", ["a", "1", "mlperf", "a-b", LONG, "a" * 54 + "-" + "b" * 8, "0" * 63]
)
def test_every_name_is_valid(job: str) -> None:
    for make in MAKERS:
        name = make(job)
        assert len(name) <= 63
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name), name
    assert names.service(job)[0].isalpha(), "the name of a service starts with a letter"


def test_short_names_are_readable() -> None:
    assert names.pod("mlperf", 3) == "mlperf-3"
    assert names.rendezvous("mlperf") == "mlperf-rendezvous"
    assert names.service("mlperf") == "mlperf"
    assert names.service("1st") == "ft-1st"


@pytest.mark.parametrize("job", ["mlperf", LONG])
def test_the_names_of_rendezvous_pods_are_known(job: str) -> None:
    own = [names.rendezvous(job, number) for number in (1, 2, 10)]
    assert all(names.is_rendezvous(job, name) for name in own)
    others = [*(f"{own[0]}{end}" for end in ("0", "1", "02", "-2", "x", "9" * 10)), "rendezvous"]
    assert not any(names.is_rendezvous(job, name) for name in (*others, names.pod(job, 2)))
    assert not any(names.is_rendezvous("other", name) for name in own)


def test_long_jobs_that_differ_at_the_end_have_different_names() -> None:
    one, other = "a" * 62 + "b", "a" * 62 + "c"
    for make in MAKERS:
        assert make(one) != make(other)


def test_the_training_pods_selector_excludes_the_rendezvous_pod() -> None:
    all_pods, trainers = names.selector("job"), names.trainer_selector("job")
    assert all_pods.items() <= trainers.items()
    assert all_pods.items() <= names.labels("job", names.RENDEZVOUS).items()
    assert not trainers.items() <= names.labels("job", names.RENDEZVOUS).items()
