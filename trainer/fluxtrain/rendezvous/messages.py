"""Messages between the agents of a job and its rendezvous service: JSON over HTTP, signed with the job's key.

A heartbeat names the service's ``boot`` and has a ``sequence`` that grows, so a recorded request is refused;
a reply is signed together with the request's signature, so a recorded reply is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from fluxtrain.contract.members import MAX_RESTARTS
from fluxtrain.contract.strict_model import StrictModel
from fluxtrain.rendezvous.rank_order import MAX_LENGTH

PATH = "/heartbeat"
SIGNATURE_HEADER = "Fluxtrain-Signature"
MAX_BYTES = 1 << 20
MAX_BYTES_WITHOUT_WORLD = 1 << 15
MAX_NODES = 4096
MAX_RANKS = 64
"""Ranks of an agent that it reports."""
MAX_STACK = 160
HEARTBEAT_SECONDS = 0.5
"""Time between two heartbeats of an agent; longer in worlds of more than 500 agents."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_LENGTH, pattern=r"^[\x21-\x7e]+$")]
Endpoint = Annotated[str, Field(max_length=300, pattern=r"^[\x21-\x7e]*$")]
Number = Annotated[int, Field(ge=0, lt=1 << 53)]
World = Annotated[tuple[Name, ...], Field(max_length=MAX_NODES)]


class _Message(StrictModel):
    """A message whose unknown fields, which a newer version may send, are ignored.

    The service runs in the operator's image, the agents in the job's.
    """

    model_config = ConfigDict(extra="ignore")


class Restart(_Message):
    """The end of a generation because trainers of the agent failed, after which they started again."""

    generation: Annotated[Number, Field(ge=1)]
    """The generation that ended."""
    cause: Annotated[str, Field(max_length=64)] = ""
    """Why they failed, as `fluxtrain.contract.members` names it; newer versions may know others."""


class RankReport(_Message):
    """The progress of a rank when the heartbeat was made."""

    rank: Number
    phase: Annotated[str, Field(max_length=64)]
    """As `fluxtrain.contract.progress` names it; newer versions may know others."""
    step: Number = 0
    seconds_since_progress: Annotated[float, Field(ge=0)]
    """By the clock of its node."""
    step_seconds: float | None = None
    """Mean seconds of a step; None before the first."""
    stack: Annotated[str, Field(max_length=MAX_STACK)] = ""
    """Where its main thread is, if it makes no progress."""
    frozen: bool = False
    """Whether its process does not respond to its agent."""
    generation: Number = 0
    """The generation that it runs in."""

    def aged(self, seconds: float) -> RankReport:
        """Return the progress ``seconds`` later, if there was none."""
        silent = self.seconds_since_progress + seconds
        return self.model_copy(update={"seconds_since_progress": silent})


class Heartbeat(_Message):
    """The state of an agent, sent every half second, or as often as the last reply said."""

    boot: str = Field(default="", max_length=64)
    """The service's ``boot`` of the last reply; empty before the first."""
    sequence: Number
    """Grows with each heartbeat of the agent."""
    attempt: Number
    """The job's attempt that the agent belongs to."""
    agent: Name
    """Unique for each process of an agent."""
    node: Name
    """The key that orders the nodes' ranks."""
    node_name: Annotated[str, Field(max_length=253, pattern=r"^[\x21-\x7e]*$")] = ""
    """Name of the node in Kubernetes; empty if ranks are not ordered by place."""
    generation: Number = 0
    """The generation that its trainers run in, or the last one that they ran in; 0 if none."""
    joining: bool = False
    """Whether its trainers are stopped and it waits for a generation after ``generation``."""
    world: World = ()
    """The agents of ``generation`` in the order of their ranks; sent if the service does not know them."""
    store: Endpoint = ""
    """host:port of the generation's TCPStore, from the agent of rank 0."""
    step: Number = 0
    """The newest step of its trainers."""
    ranks: Annotated[tuple[RankReport, ...], Field(max_length=MAX_RANKS)] = ()
    """The progress of its trainers; none if it is not valid, as a heartbeat counts anyway."""
    restarts: Annotated[tuple[Restart, ...], Field(max_length=MAX_RESTARTS)] = ()
    """The agent's newest restarts, by generation; repeated, as the service may be another one."""
    leaving: bool = False
    """Whether the agent ends: its node is no longer part of the job."""
    closing: bool = False
    """Whether the attempt ends: no further generation forms."""
    succeeded: bool = False
    """Whether it ends because the task is complete."""
    exit_code: Annotated[int, Field(ge=0, le=255)] = 0
    """Exit code of all agents, if the attempt ends because of an error that each of them would find."""
    node_rank: Number | None = None
    """The rank that the user gave the node, if any."""
    setup: Annotated[str, Field(max_length=256)] = ""
    """What the trainers of all nodes must have in common; empty: the same by the way they are started."""

    @field_validator("ranks", mode="wrap")
    @classmethod
    def _valid_ranks(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(tuple(value) if isinstance(value, list) else value)  # JSON's arrays
        except ValidationError:
            return ()


class Reply(_Message):
    """The newest generation, and what the agent must do."""

    boot: str = Field(max_length=64)
    """A random number of the service's process."""
    generation: Number = 0
    """The newest generation; 0 if none was formed yet."""
    world: World = ()
    """Its agents in the order of their ranks; sent to those of them that do not know it."""
    store: Endpoint = ""
    """host:port of its TCPStore; empty until the agent of rank 0 reported it."""
    broken: bool = False
    """Whether an agent of the generation is lost, has left or waits for the next one."""
    lost: bool = False
    """Whether an agent of the generation is lost: it did not stop its trainers."""
    reform: bool = False
    """Whether this agent must stop its trainers and join the next generation."""
    closed: bool = False
    """Whether the attempt has ended."""
    ended: Number = 0
    """The generations up to this one were ended by the operator, because their trainers hang; 0 if none."""
    exit_code: Annotated[int, Field(ge=0, le=255)] = 0
    """Exit code of all agents if it has; 0: complete, or no code was told."""
    refused: Annotated[str, Field(max_length=1024)] = ""
    """Why the agent may not take part; empty if it may."""
    waiting: Number = 0
    """Agents that wait for a generation."""
    unknown: bool = False
    """Whether the agent must send the world of its generation."""
    heartbeat_seconds: Annotated[float, Field(ge=HEARTBEAT_SECONDS, le=60)] = HEARTBEAT_SECONDS
    """Time until the agent's next heartbeat, if nothing but its step changes."""


_SIGNATURE = re.compile(r"[0-9a-f]{64}")


def is_plausible(signature: str) -> bool:
    """Return whether ``signature`` has the form of a signature."""
    return _SIGNATURE.fullmatch(signature) is not None


def request_signature(key: bytes, body: bytes) -> str:
    """Return the signature of a heartbeat."""
    return hmac.new(key, b"request\n" + body, hashlib.sha256).hexdigest()


def reply_signature(key: bytes, request: str, body: bytes) -> str:
    """Return the signature of the reply ``body`` to the heartbeat with signature ``request``."""
    content = b"reply\n" + request.encode("ascii", "replace") + b"\n" + body
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def is_valid(signature: str, expected: str) -> bool:
    """Return whether both signatures are equal, in constant time."""
    return hmac.compare_digest(signature.encode(), expected.encode())
