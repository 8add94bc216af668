"""The rendezvous service of a job: heartbeats over HTTP, signed with the job's key.

It holds nothing that running trainers need: they continue while it is gone, and a service that starts
empty learns the current generation from the next heartbeats. Another port serves /members, /progress and
/healthz, without a key.

Of nodes that are started by hand or by Slurm only those are admitted that start the same trainers as the
first one, and of two with the same rank the one that came first: a command that was typed twice, or with
other options on one node, must not train.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fluxtrain.contract.process import (
    LOST_SECONDS,
    MEMBERS_PATH,
    PROGRESS_PATH,
    phase_of,
    pod_of,
    stall_seconds,
)
from fluxtrain.errors import StorageError
from fluxtrain.rendezvous.http_server import (
    EVERY_ADDRESS,
    STATUS_BOUNDS,
    Bounds,
    Handler,
    Server,
    host_port,
    raise_limit,
)
from fluxtrain.rendezvous.membership import Limits, Membership, heartbeat_seconds
from fluxtrain.rendezvous.messages import (
    MAX_BYTES,
    MAX_BYTES_WITHOUT_WORLD,
    MAX_NODES,
    PATH,
    SIGNATURE_HEADER,
    Heartbeat,
    Key,
    RankReport,
    Reply,
    reply_signature,
)

_NUM_FIRST = 2
"""Ranks that stopped first: the first of them is told apart from the next one."""

AgentReport = tuple[str, RankReport]
S = TypeVar("S", bound=Server)


def progress_report(reports: Sequence[AgentReport]) -> dict[str, Any]:
    """Return the answer: of each phase the ranks that stall last, and of all those that stopped first.

    So it is small for any number of ranks, and its reader finds the same deadline as from all of them.
    """
    chosen = {each[1].rank: each for each in sorted(reports, key=_stop_order)[:_NUM_FIRST]}
    by_phase = defaultdict[tuple[str, bool], list[AgentReport]](list)
    for each in reports:
        by_phase[each[1].phase, each[1].step_seconds is None].append(each)
    for of_phase in by_phase.values():
        for last in (min(of_phase, key=_silent), max(of_phase, key=_seconds_left)):
            chosen[last[1].rank] = last
    return {"ranks": [_entry(*chosen[rank]) for rank in sorted(chosen)]}


def _stop_order(each: AgentReport) -> tuple[bool, int, float]:
    """Return the order of `fluxtrain_operator.planner.watchdog`."""
    _, report = each
    return not report.frozen, report.step, -_silent(each)


def _silent(each: AgentReport) -> float:
    return each[1].seconds_since_progress


def _seconds_left(each: AgentReport) -> float:
    """Return the seconds until the rank has stalled, unless the job sets its own limit."""
    _, report = each
    phase = phase_of(report.phase)
    return (stall_seconds(phase, report.step_seconds) if phase else 0.0) - _silent(each)


def _entry(agent: str, report: RankReport) -> dict[str, Any]:
    return {
        "rank": report.rank,
        "pod": pod_of(agent),
        "phase": report.phase,
        "step": report.step,
        "secondsSinceProgress": round(report.seconds_since_progress, 3),
        **({"stepSeconds": report.step_seconds} if report.step_seconds is not None else {}),
        **({"stack": report.stack} if report.stack else {}),
        **({"frozen": True} if report.frozen else {}),
        **({"generation": report.generation} if report.generation else {}),
    }


@dataclass
class _Holder:
    agent: str
    node: str
    last_seen: float


@dataclass
class Admission:
    """The agents that were admitted, by the ranks of their nodes; ``now`` is a monotonic clock in seconds."""

    setup: str
    """What all agents must tell as their ``setup``."""
    lost_seconds: float = LOST_SECONDS
    """A rank is free again after its agent has been silent for this long."""
    _holders: dict[int, _Holder] = field(default_factory=dict)

    def refusal(self, beat: Heartbeat, now: float) -> str:
        """Return why the agent of ``beat`` may not take part; empty if it may."""
        if beat.setup != self.setup:
            return f"this node starts {beat.setup}; the node with the rendezvous {self.setup}"
        if beat.node_rank is None:
            return ""
        holder = self._holders.get(beat.node_rank)
        if holder and holder.agent != beat.agent and now - holder.last_seen <= self.lost_seconds:
            return f"--node-rank: got {beat.node_rank}; {holder.node} has this rank already"
        if beat.leaving:
            self._holders.pop(beat.node_rank, None)
        else:
            self._holders[beat.node_rank] = _Holder(beat.agent, beat.node_name, now)
        return ""


_GRACE_SECONDS = 2.0
"""How long a new service only listens: agents of a generation that runs send heartbeats meanwhile."""
_SPARE_CONNECTIONS = 256
"""Of the port for heartbeats, beside two for each agent. A connection has a thread: thousands that wake up
together, as when a client drops them, would keep the agents waiting for seconds."""
_OTHER_FILES = 256
"""For the other port, and for connections that close."""
_NAME = "rendezvous"
_TEXT, _JSON = "text/plain", "application/json"
_LENGTH, _SIGNATURE = re.compile("[0-9]{1,9}", re.ASCII), re.compile("[0-9a-f]{64}")
_MAX_WORLDS = 16
"""Bodies with a world that are read at a time: all others are small."""


@dataclass
class Sessions:
    """The membership of the newest attempt; thread-safe."""

    limits: Limits
    ended: tuple[int, int] = (0, 0)
    """An attempt, and the generation of it up to which all must end."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Places of nodes, for the order of ranks; see `Membership`."""
    admission: Admission | None = None
    """Which agents may take part; None: all that have the key."""
    clock: Callable[[], float] = time.monotonic
    boot: str = field(default_factory=lambda: secrets.token_hex(16))
    attempt: int = -1

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._sequences = dict[str, int]()
        grace = max(_GRACE_SECONDS, 2 * heartbeat_seconds(self.limits.wanted_nodes))
        self._forms_after = self.clock() + grace
        self._membership = self._new()

    def heartbeat(self, beat: Heartbeat) -> Reply:
        """Return the reply to ``beat``; one of an earlier attempt is told that its attempt is closed."""
        if beat.boot != self.boot:
            return Reply(boot=self.boot, unknown=True)
        with self._lock:
            if beat.attempt < self.attempt or not self._is_new(beat):
                return Reply(boot=self.boot, closed=beat.attempt < self.attempt)
            if self.admission and (reason := self.admission.refusal(beat, self.clock())):
                return Reply(boot=self.boot, refused=reason)
            if beat.attempt > self.attempt:
                self.attempt = beat.attempt
                self._membership = self._new()
            reply = self._membership.heartbeat(beat, self.clock())
        return reply.model_copy(update={"boot": self.boot})

    def close(self, exit_code: int) -> None:
        """End the attempt: no further generation forms, and all agents end with ``exit_code``."""
        with self._lock:
            self._membership.closed = True
            self._membership.exit_code = self._membership.exit_code or exit_code

    def members(self) -> dict[str, Any]:
        """Return the attempt, the generation, who is alive, who is lost, the restarts.

        A new service lists restarts once all agents have told theirs: the operator counts them in order.
        """
        with self._lock:
            now, membership = self.clock(), self._membership
            membership.expire(now)
            return {
                "attempt": max(0, self.attempt),
                "generation": membership.generation,
                "world": list(membership.world),
                "alive": membership.alive,
                "lostSeconds": {
                    name: round(now - seen, 1) for name, seen in membership.lost.items()
                },
                "restarts": _restarts(membership) if now >= membership.forms_after else [],
            }

    def progress(self) -> dict[str, Any]:
        """Return the progress of the ranks that decide whether the job stalls, as their agents report it."""
        with self._lock:
            now = self.clock()
            self._membership.expire(now)
            reports = self._membership.rank_reports(now)
        return progress_report(reports)

    def _new(self) -> Membership:
        attempt, generation = self.ended
        ended = generation if attempt == self.attempt else 0
        return Membership(self.limits, ended, self.places, forms_after=self._forms_after)

    def _is_new(self, beat: Heartbeat) -> bool:
        """Return whether ``beat`` is later than all of its agent, and remember it."""
        if beat.sequence <= self._sequences.get(beat.agent, -1):
            return False
        self._sequences.pop(beat.agent, None)
        self._sequences[beat.agent] = beat.sequence
        if len(self._sequences) > 4 * MAX_NODES:  # the one that was silent for longest
            self._sequences.pop(next(iter(self._sequences)))
        return True


def _restarts(membership: Membership) -> list[dict[str, object]]:
    return [
        {"generation": generation, "cause": restart.cause, "agent": restart.agent}
        for generation, restart in sorted(membership.restarts.items())
    ]


class _MembersServer(Server):
    """The server for what is known of the agents."""

    def __init__(self, sessions: Sessions, address: tuple[str, int]) -> None:
        self.sessions = sessions
        super().__init__(_NAME, address, _MembersHandler, STATUS_BOUNDS)


class _HeartbeatServer(Server):
    """The server for heartbeats, which bounds how many large ones are read at a time."""

    def __init__(self, sessions: Sessions, key: Key, address: tuple[str, int]) -> None:
        self.sessions, self.key = sessions, key
        self.worlds = threading.BoundedSemaphore(_MAX_WORLDS)
        super().__init__(_NAME, address, _HeartbeatHandler, _bounds(sessions.limits))


def serve(sessions: Sessions, key: Key, address: str, port: int) -> _HeartbeatServer:
    """Serve heartbeats on ``address:port`` in a thread; StorageError if it cannot listen."""
    return _started(partial(_HeartbeatServer, sessions, key), address, port)


def serve_members(sessions: Sessions, address: str, port: int) -> Server:
    """Serve /members and /healthz on ``address:port`` in a thread; StorageError if it cannot listen."""
    return _started(partial(_MembersServer, sessions), address, port)


def _started(make: Callable[[tuple[str, int]], S], address: str, port: int) -> S:
    try:
        server = make((address, port))
    except OSError as error:
        text = f"the rendezvous cannot listen on {host_port(address, port)} ({error.strerror})"
        raise StorageError(text) from None
    server.start()
    return server


def _bounds(limits: Limits) -> Bounds:
    """Return the bounds of the port for heartbeats; fewer where the process may not open as many files."""
    wanted = _SPARE_CONNECTIONS + 2 * limits.wanted_nodes
    files = raise_limit(wanted + _OTHER_FILES)
    return Bounds(min(wanted, max(1, files - _OTHER_FILES)), _SPARE_CONNECTIONS)


class _MembersHandler(Handler):
    server: _MembersServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # noqa: N802  (of http.server)
        if self.path == "/healthz":
            self.respond(200, b"ok\n", _TEXT)
        elif self.path == MEMBERS_PATH:
            self.respond(200, json.dumps(self.server.sessions.members()).encode(), _JSON)
        elif self.path == PROGRESS_PATH:
            self.respond(200, json.dumps(self.server.sessions.progress()).encode(), _JSON)
        else:
            self.respond(404, b"not found\n", _TEXT)


class _HeartbeatHandler(Handler):
    server: _HeartbeatServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # noqa: N802  (of http.server)
        length = self.headers.get("Content-Length", "")
        signature = self.headers.get(SIGNATURE_HEADER, "")
        if self.path != PATH or not _LENGTH.fullmatch(length) or int(length) > MAX_BYTES:
            return self._refuse(400, b"not a heartbeat\n")
        if not _SIGNATURE.fullmatch(signature):
            return self._refuse(403, b"no signature\n")
        body = self._body(int(length))
        if body is None:
            return self._refuse(503, b"too many worlds at a time\n")
        if (key := self.server.key.of_request(body, signature)) is None:
            return self._refuse(403, b"wrong signature\n")
        try:
            beat = Heartbeat.model_validate_json(body)
        except ValidationError as error:
            return self.respond(400, f"{error.errors()[0]['msg']}\n".encode(), _TEXT)
        reply = self.server.sessions.heartbeat(beat)
        content = reply.model_dump_json(exclude_defaults=True).encode()
        signed = reply_signature(key, signature, content)
        return self.respond(200, content, _JSON, [(SIGNATURE_HEADER, signed)])

    def _refuse(self, status: int, message: bytes) -> None:
        self.close_connection = True
        self.respond(status, message, _TEXT)

    def _body(self, length: int) -> bytes | None:
        """Return the body; None if as many large ones are being read as may."""
        if length <= MAX_BYTES_WITHOUT_WORLD:
            return self.rfile.read(length)
        if not self.server.worlds.acquire(blocking=False):
            return None
        try:
            return self.rfile.read(length)
        finally:
            self.server.worlds.release()


def run(
    port: int,
    members_port: int,
    limits: Limits,
    key: Path,
    ended: tuple[int, int] = (0, 0),
    places: Mapping[str, int] | None = None,
    address: str = EVERY_ADDRESS,
) -> None:
    """Serve until SIGTERM or SIGINT; ``key`` is a file with the key of the job, the rest as in `Sessions`.

    Raises StorageError if the file cannot be read or is empty, or if a port is in use.
    """
    try:
        secret = key.read_bytes()
    except OSError as error:
        raise StorageError(f"--key {key}: cannot be read ({error.strerror})") from None
    if not secret:
        raise StorageError(f"--key {key}: is empty, and anyone could sign with an empty key")
    sessions, signums = Sessions(limits, ended, places or {}), {signal.SIGTERM, signal.SIGINT}
    # a handler would run only once the main thread wakes up, and the kernel may wake another
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    try:
        servers = (
            serve(sessions, Key(secret, key), address, port),
            serve_members(sessions, address, members_port),
        )
        signal.sigwait(signums)
        for server in servers:
            server.stop()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
