"""Whatever a job's status says: a plan takes no time that it names, and its own status can be written."""

from __future__ import annotations

import time

import pytest
from tests.api_server.forged_statuses import FORGED
from tests.operator.jobs import make_job

from fluxtrain.contract.resource.status import Status, read_status
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.plan import load, plan


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", FORGED)
def test_a_forged_status_stops_no_plan_and_is_written_again(what: str) -> None:
    job = load({**make_job(), "status": FORGED[what]}, "trainer:1")
    done = plan(job, Observed.from_objects([], applied={}), time.time())
    written = done.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert Status.model_validate(written) == read_status(written)
    names = {manifest["metadata"]["name"] for manifest in done.create}
    assert all(name == "job" or name.startswith("job-") for name in names)
    assert not done.delete, "it has no pods, whatever it says"


def test_restarts_that_are_counted_ahead_are_counted_once() -> None:
    status = {"phase": "Running", "attempt": 1, "restarts": {"process": 2**31 - 1, "charged": 0}}
    job = load({**make_job(), "status": status}, "trainer:1")
    restarts = plan(job, Observed.from_objects([], applied={}), time.time()).status.restarts
    assert restarts is not None
    assert all(0 <= count < 2**31 for count in restarts.causes.values())
