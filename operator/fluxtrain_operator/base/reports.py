"""Progress as trainers and agents report it, at /progress and in termination messages; validated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from fluxtrain.contract.process import MAX_RESTARTS, Cause, Phase, phase_of, pod_of, root_cause
from fluxtrain.contract.resource.status import CheckpointStatus, ProgressStatus
from fluxtrain_operator.base.names import seconds, stamp

_MAX_COUNT = 2**31 - 1
_MAX_SAMPLES = 2**53
_MAX_TIME = 253_402_300_799  # the last second of the year 9999
_MAX_SECONDS = 10 * 366 * 86_400.0
"""Of a phase or of the training; a longer time is not credible."""
_MAX_RANKS, _MAX_STACK = 64, 512
_MAX_UID, _MAX_SLOWDOWN = 64, 1000.0
_SHA256 = re.compile("[0-9a-f]{64}")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
"""ECMA-48: control sequences such as colors, operating system commands such as titles, and others."""


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank when the response was made.

    Times do not count in comparisons: they differ in each response, and change nothing before they are due.
    """

    rank: int
    phase: Phase
    step: int = 0
    seconds_since_progress: float = field(default=0.0, compare=False)
    step_seconds: float | None = field(default=None, compare=False)
    stack: str = ""
    """Where its main thread is; empty while it makes progress."""
    pod: str = ""
    """Uid of its pod."""
    generation: int = 0
    """Generation of the agents that it runs in; 0 if it is not reported."""
    frozen: bool = False
    """Whether its process does not respond to its agent."""

    @staticmethod
    def from_json(values: object) -> RankProgress | None:
        """Return the progress of a rank in ``values``; None without a phase or the time of its progress."""
        if not isinstance(values, Mapping):
            return None
        phase = phase_of(values.get("phase"))
        silent = _number(values.get("secondsSinceProgress"))
        if phase is None or silent is None:
            return None
        return RankProgress(
            rank=_count(values.get("rank"), _MAX_COUNT),
            phase=phase,
            step=_count(values.get("step"), _MAX_COUNT),
            seconds_since_progress=max(0.0, silent),
            step_seconds=_number(values.get("stepSeconds")),
            stack=_line(values.get("stack")),
            generation=_count(values.get("generation"), _MAX_COUNT),
            frozen=values.get("frozen") is True,
        )

    @staticmethod
    def from_agent(values: object) -> RankProgress | None:
        """Return the progress of a rank in ``values``, which name its pod; None if they do not."""
        pod = values.get("pod") if isinstance(values, Mapping) else None
        rank = RankProgress.from_json(values)
        if rank is None or not isinstance(pod, str) or not 0 < len(pod) <= _MAX_UID:
            return None
        return replace(rank, pod=pod)


@dataclass(frozen=True)
class Straggler:
    """The slowest rank, as rank 0 reports it."""

    rank: int
    pod: str
    """Uid of its pod, which may be any text."""
    cause: Cause
    slowdown: float

    @staticmethod
    def from_json(values: object) -> Straggler | None:
        """Return the straggler in ``values``; None if there is none, or a value is not credible."""
        if not isinstance(values, Mapping):
            return None
        rank, slowdown = values.get("rank"), _number(values.get("slowdown"))
        cause = next((cause for cause in get_args(Cause) if cause == values.get("cause")), None)
        if type(rank) is not int or not 0 <= rank <= _MAX_COUNT or cause is None:
            return None
        if slowdown is None or not 1.0 < slowdown <= _MAX_SLOWDOWN:
            return None
        pod = values.get("pod")
        uid = pod[:_MAX_UID] if isinstance(pod, str) else ""
        return Straggler(rank, uid, cause, float(f"{slowdown:.3g}"))


@dataclass(frozen=True)
class Progress:
    """The training's progress, its newest checkpoint, and the restarts of processes within pods."""

    status: ProgressStatus
    """With times by the trainer's clock."""
    checkpoint: CheckpointStatus | None = None
    process_restarts: int = 0
    rank: int = 0
    phase: Phase | None = None
    """Phase of the process; None if it is not reported."""
    ranks: tuple[RankProgress, ...] = ()
    """The ranks of the node, or of all nodes if this one makes no progress."""
    age: float = field(default=0.0, compare=False)
    """Seconds since the response was received, by the operator's monotonic clock."""
    seconds_since_step: float | None = field(default=None, compare=False)
    """Seconds from the last step to the response; None before a step."""
    num_nodes: int | None = None
    """Nodes that train together; None if it is not reported."""
    straggler: Straggler | None = None
    """The rank that all others wait for."""
    train_seconds_before: float | None = None
    """Training time that the output already contained when these processes started."""
    log_head: tuple[int, str] | None = None
    """Records in the chain of the MLPerf log, and the SHA-256 of the last one; None if none is reported."""
    by_agents: bool = False
    """Whether only agents report it, through the rendezvous service: nothing but ``ranks`` is known."""

    @staticmethod
    def from_json(answer: object) -> Progress | None:
        """Return the progress in a decoded answer; invalid values are left out."""
        if not isinstance(answer, Mapping):
            return None
        step = _count(answer.get("checkpointStep"), _MAX_COUNT)
        time = _time(answer.get("checkpointTime"))
        return Progress(
            status=_status(answer),
            checkpoint=CheckpointStatus(step=step, time=time) if step else None,
            process_restarts=_count(answer.get("processRestarts"), _MAX_COUNT),
            rank=_count(answer.get("rank"), _MAX_COUNT),
            phase=phase_of(answer.get("phase")),
            ranks=_ranks(answer),
            seconds_since_step=_number(answer.get("secondsSinceStep")),
            num_nodes=_count(answer.get("numNodes"), _MAX_COUNT) or None,
            straggler=Straggler.from_json(answer.get("straggler")),
            train_seconds_before=_duration(answer.get("trainSecondsBefore")),
            log_head=_log_head(answer.get("logHead")),
        )

    @staticmethod
    def from_agents(answer: object) -> Progress | None:
        """Return the ranks in a decoded answer of the rendezvous service; None if there is no valid one."""
        listed = answer.get("ranks") if isinstance(answer, Mapping) else None
        entries = listed[:_MAX_RANKS] if isinstance(listed, list) else []
        ranks = [rank for rank in map(RankProgress.from_agent, entries) if rank is not None]
        return Progress(ProgressStatus(), by_agents=True)._with(ranks)

    def of_pods(self, uids: Container[str]) -> Progress | None:
        """Return the progress of the ranks in pods with these ``uids`` only; None if there are none."""
        return self._with([rank for rank in self.ranks if rank.pod in uids])

    def _with(self, ranks: Sequence[RankProgress]) -> Progress | None:
        lowest = min(ranks, key=lambda rank: rank.rank, default=None)
        if lowest is None:
            return None
        return replace(self, ranks=tuple(ranks), rank=lowest.rank, phase=lowest.phase)

    @property
    def seconds_since_progress(self) -> float | None:
        """Return the seconds since any of the ranks made progress; None without ranks."""
        silent = min((rank.seconds_since_progress for rank in self.ranks), default=None)
        return None if silent is None else silent + self.age

    def ended_at(self, time: float | None) -> Progress:
        """Return this progress as that of a pod that ended at ``time``, by its clock too, if it is known."""
        last = seconds(self.status.last_step_time)
        since = None if time is None or last is None else time - last
        return replace(self, seconds_since_step=since)

    def with_ranks(self, others: Iterable[Progress]) -> Progress:
        ranks = {rank.rank: rank for other in (*others, self) for rank in other.ranks}
        return replace(self, ranks=tuple(ranks[rank] for rank in sorted(ranks)))

    def in_pod(self, uid: str) -> Progress:
        return replace(self, ranks=tuple(replace(rank, pod=uid) for rank in self.ranks))


@dataclass(frozen=True)
class TerminationMessage:
    """The termination message of a container."""

    text: str = ""
    progress: Progress | None = None
    """The last progress, if rank 0 ran in it."""
    process_restarts: int = 0


def read_termination_message(message: object) -> TerminationMessage:
    """Return the content of a container's termination ``message``, without what a terminal would act on.

    If the agent wrote none, the message is the end of the container's log.
    """
    if not isinstance(message, str):
        return TerminationMessage()
    try:
        values = json.loads(message)
    except (ValueError, RecursionError):
        return TerminationMessage(_printable(message))
    if not isinstance(values, Mapping):
        return TerminationMessage(_printable(message))
    return TerminationMessage(
        text=_printable(str(values.get("message") or "")),
        progress=Progress.from_json(values) if values.get("rank") == 0 else None,
        process_restarts=_count(values.get("processRestarts"), _MAX_COUNT),
    )


def _status(answer: Mapping[str, Any]) -> ProgressStatus:
    return ProgressStatus(
        step=_count(answer.get("step"), _MAX_COUNT),
        steps=_count(answer.get("steps"), _MAX_COUNT) or None,
        epoch=_count(answer.get("epoch"), _MAX_COUNT) or None,
        epochs=_count(answer.get("epochs"), _MAX_COUNT) or None,
        samples=_count(answer.get("samples"), _MAX_SAMPLES),
        trainLoss=_number(answer.get("trainLoss")),
        evalLoss=_number(answer.get("evalLoss")),
        targetSamples=_count(answer.get("targetSamples"), _MAX_SAMPLES) or None,
        samplesPerSecond=_number(answer.get("samplesPerSecond")),
        mfu=_number(answer.get("mfu")),
        remainingSeconds=_number(answer.get("remainingSeconds")),
        trainSeconds=_duration(answer.get("trainSeconds")),
        firstStepTime=_time(answer.get("firstStepTime")),
        lastStepTime=_time(answer.get("lastStepTime")),
        phaseSeconds=_phase_seconds(answer.get("phaseSeconds")),
    )


def _phase_seconds(values: object) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    numbers = {phase: _duration(values.get(phase)) for phase in get_args(Phase)}
    return {phase: number for phase, number in numbers.items() if number is not None}


def _ranks(answer: Mapping[str, Any]) -> tuple[RankProgress, ...]:
    """Return the valid ranks in ``answer``, or the process itself if it lists none."""
    listed = answer.get("ranks")
    entries = listed[:_MAX_RANKS] if isinstance(listed, list) and listed else [answer]
    ranks = (RankProgress.from_json(entry) for entry in entries)
    return tuple(rank for rank in ranks if rank is not None)


def _log_head(values: object) -> tuple[int, str] | None:
    if not isinstance(values, Mapping):
        return None
    records, sha256 = values.get("records"), values.get("sha256")
    if type(records) is not int or not 0 < records <= _MAX_COUNT:
        return None
    return (records, sha256) if isinstance(sha256, str) and _SHA256.fullmatch(sha256) else None


def _printable(text: str) -> str:
    """Return ``text`` with its line breaks; escape sequences and other control characters become spaces."""
    plain = _ESCAPES.sub("", text).replace("\r\n", "\n")
    return "".join(c if c.isprintable() or c == "\n" else " " for c in plain)


def _line(value: object) -> str:
    """Return the printable characters of the first line of ``value``."""
    lines = value[:_MAX_STACK].splitlines() if isinstance(value, str) else []
    return "".join(c for c in lines[0] if c.isprintable()) if lines else ""


def _number(value: object) -> float | None:
    """Return ``value`` rounded to six digits for the status; None if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON integers are unbounded
        return None
    return float(f"{number:.6g}") if math.isfinite(number) else None


def _duration(value: object) -> float | None:
    """Return ``value`` as credible seconds, at least 0; None if it is not."""
    number = _number(value)
    return None if number is None or number > _MAX_SECONDS else max(0.0, number)


def _count(value: object, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return min(max(value, 0), maximum)


def _time(value: object) -> str | None:
    """Return the Unix time ``value`` as a timestamp; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_TIME:
        return None
    return stamp(float(value))


@dataclass(frozen=True)
class ProcessRestart:
    """A generation that ended because trainers failed; they started again inside their pods."""

    generation: int
    cause: str
    pod: str = ""
    """Uid of the pod whose agent reports it."""

    @staticmethod
    def from_json(values: object) -> ProcessRestart | None:
        """Return the restart in ``values``; None without a number of a generation."""
        if not isinstance(values, Mapping):
            return None
        generation, agent = values.get("generation"), values.get("agent")
        if type(generation) is not int or not 0 < generation <= _MAX_COUNT:
            return None
        pod = pod_of(agent) if isinstance(agent, str) else ""
        return ProcessRestart(generation, root_cause([str(values.get("cause"))]), pod)


@dataclass(frozen=True)
class MembersReport:
    """Which pods of a job are heard of, by uid; others may be starting, or the service is being replaced."""

    alive: frozenset[str] = frozenset()
    """Pods whose agents send heartbeats, or whose world makes steps."""
    silent: frozenset[str] = frozenset()
    """Pods all of whose agents are lost; the rendezvous pod if it does not answer any more."""
    attempt: int | None = None
    """The attempt of its agents; None without an answer."""
    restarts: tuple[ProcessRestart, ...] = ()
    """The newest restarts in that attempt, by generation."""
    generation: int | None = None
    """The newest generation of that attempt, 0 until its agents have met; None without an answer."""

    @staticmethod
    def from_json(answer: object) -> MembersReport | None:
        """Return what a decoded answer says, None if it is not one; invalid values are left out."""
        if not isinstance(answer, Mapping) or type(attempt := answer.get("attempt")) is not int:
            return None
        alive, lost = answer.get("alive"), answer.get("lostSeconds")
        living = _pods(alive if isinstance(alive, list) else [])
        silent = _pods(lost if isinstance(lost, Mapping) else []) - living
        return MembersReport(
            living,
            silent,
            attempt,
            _restarts(answer.get("restarts")),
            _generation(answer.get("generation")),
        )


NO_MEMBERS = MembersReport()


def _generation(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else None


def _pods(agents: Mapping[object, object] | list[object]) -> frozenset[str]:
    return frozenset(pod_of(agent) for agent in agents if isinstance(agent, str))


def _restarts(listed: object) -> tuple[ProcessRestart, ...]:
    """Return the newest valid restarts, one of each generation."""
    entries = listed[-MAX_RESTARTS:] if isinstance(listed, list) else []
    read = map(ProcessRestart.from_json, entries)
    by_generation = {restart.generation: restart for restart in read if restart is not None}
    return tuple(by_generation[generation] for generation in sorted(by_generation))
