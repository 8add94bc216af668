"""Whatever pods send to a rendezvous service: its agents go on, and it stays within bounds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.trainer.rendezvous.hostile.attacks import WITH_KEY, WITHOUT_KEY, Attack, Target, replay
from tests.trainer.rendezvous.hostile.besieged import Besieged, besieged, heartbeats, p99

from fluxtrain.errors import StorageError
from fluxtrain.rendezvous.membership import LOST_HEARTBEATS, Limits
from fluxtrain.rendezvous.service import run

pytestmark = pytest.mark.slow

MAX_MIB, MAX_FILES = 512, 256 + 2 * 2 + 64 + 256
"""A quarter of the limit of the service's pod; the bounds of its two ports, and what closes."""
ATTACKS: dict[str, Attack] = {**WITHOUT_KEY, **WITH_KEY}


@pytest.mark.proof
def test_agents_go_on_whatever_is_sent_to_their_service(tmp_path: Path) -> None:
    with besieged(tmp_path) as job:
        with heartbeats(job.agents):
            time.sleep(2)
            quiet = p99([s for agent in job.agents for s in agent.seconds])
            rows = [attack_row(what, attack, job) for what, attack in ATTACKS.items()]
        members = job.members()
        failed = sum(agent.failed for agent in job.agents)
        together = max(agent.failed_together for agent in job.agents)
        peak = job.peak_mib
        assert job.process.poll() is None
        for agent in job.agents:
            assert agent.client.exchange(), agent.client.problem
            assert agent.client.reply is not None
            assert not agent.client.reply.reform
            assert not agent.client.reply.closed
    count = sum(len(agent.seconds) for agent in job.agents)
    print(f"{len(rows)} attacks; {count} heartbeats of 2 agents, {failed} without a reply, at most")
    print(f"{together} one after the other; p99 without attacks {quiet * 1e3:.1f} ms; {peak} MiB")
    for seconds, files, what, answer in sorted(rows, reverse=True):
        print(f"{seconds * 1e3:8.1f} ms  {files:5} files  {what:55} {answer}")
    assert members["generation"] == 1
    assert members["world"] == ["agent-0", "agent-1"]
    assert not {"agent-0", "agent-1"} & members["lostSeconds"].keys()
    assert together < LOST_HEARTBEATS, "an agent that begins is heard too"
    assert peak < MAX_MIB
    assert max(files for _, files, _, _ in rows) < MAX_FILES
    accepted = [what for _, _, what, answer in rows if what in MUST_BE_REFUSED and "200" in answer]
    assert not accepted


MUST_BE_REFUSED = {what for what in WITHOUT_KEY if "recorded" not in what and "/" not in what}
"""What has no valid signature; a recorded request is answered, and changes nothing."""


def attack_row(what: str, attack: Attack, job: Besieged) -> tuple[float, int, str, str]:
    """Return p99 of the agents meanwhile, the service's files, the attack and its answer."""
    known = [len(agent.seconds) for agent in job.agents]
    failed = sum(agent.failed for agent in job.agents)
    answer = attack(job.target)
    files = job.open_files
    while any(len(a.seconds) < n + 5 for a, n in zip(job.agents, known, strict=True)):
        time.sleep(0.01)
    seconds = [s for a, n in zip(job.agents, known, strict=True) for s in a.seconds[n:]]
    if failed := sum(agent.failed for agent in job.agents) - failed:
        answer += f"; {failed} heartbeats failed"
    return p99(seconds), files, what, answer


def test_a_recorded_request_does_nothing_in_a_later_round_or_after_another_key(
    tmp_path: Path,
) -> None:
    with besieged(tmp_path) as job:
        job.meet()
        assert job.members()["generation"] == 2
        before = state(job)
        assert replay(job.target).startswith("200")  # with a reply that says nothing
        assert state(job) == before
        job.key_file.write_bytes(b"f" * 64)
        time.sleep(1.1)  # files are read once a second
        deadline = time.monotonic() + 20
        for agent in job.agents:
            while not agent.client.exchange() or agent.client._key.newest != b"f" * 64:
                agent.client._key.refresh()
                assert time.monotonic() < deadline
        assert replay(job.target).startswith("200")
        assert state(job) == before


def state(job: Besieged) -> tuple[int, list[str], list[str]]:
    members = job.members()
    return members["generation"], members["world"], sorted(members["alive"])


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"", "anyone could sign")]
)
def test_a_service_without_a_key_does_not_start(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StorageError, match=message):
        run(0, 0, Limits(1, 1), file, address="127.0.0.1")


def test_an_answer_is_not_signed_without_the_key(tmp_path: Path) -> None:
    with besieged(tmp_path) as job:
        target: Target = job.target
        assert target.send(target.recorded).startswith("200")
        assert target.send(target.recorded.replace(b"agent-0", b"agent-9")).startswith("403")
