"""Messages between the agents of a job and its rendezvous service: JSON over HTTP, signed with the job's key.

A heartbeat names the service's ``boot`` and has a ``sequence`` that grows, so a recorded request is
refused; a reply is signed together with the request's signature, so a recorded reply is refused.

If the file of the key gets another one, agents and service take that over: whoever may delete secrets
can delete that of a job, whose next pod gets another, and the kubelets write it to the files of all pods
within two minutes, though not at once. Nodes that share a file system have it in a file in the run's
output that only its owner can read; it is kept when the run ends, so that nodes that are left understand
a rendezvous that is started again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from fluxtrain.contract.model_base import StrictModel
from fluxtrain.contract.process import ENV_NODE, ENV_TOPOLOGY, MAX_RESTARTS, natural
from fluxtrain.errors import StorageError

MAX_LENGTH = 256
"""Of a key, in characters."""


def rank_order_key(environment: Mapping[str, str], hostname: str) -> str:
    """Return the key that orders the ranks of this pod; only the host name if nothing else is known."""
    parts = (environment.get(ENV_TOPOLOGY), environment.get(ENV_NODE), hostname)
    return "/".join(part for part in parts if part)[:MAX_LENGTH]


def rank_order(place: int | None, key: str, agent: str) -> tuple[object, ...]:
    """Return what sorts an agent: nodes whose ``place`` is unknown come last."""
    return place is None, place or 0, natural(key), agent


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
    """Why they failed, as `fluxtrain.contract.process` names it; newer versions may know others."""


class RankReport(_Message):
    """The progress of a rank when the heartbeat was made."""

    rank: Number
    phase: Annotated[str, Field(max_length=64)]
    """As `fluxtrain.contract.process` names it; newer versions may know others."""
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


def request_signature(key: bytes, body: bytes) -> str:
    return hmac.new(key, b"request\n" + body, hashlib.sha256).hexdigest()


def reply_signature(key: bytes, request: str, body: bytes) -> str:
    """Return the signature of the reply ``body`` to the heartbeat with signature ``request``."""
    content = b"reply\n" + request.encode("ascii", "replace") + b"\n" + body
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def is_valid(signature: str, expected: str) -> bool:
    """Return whether both signatures are equal, in constant time."""
    return hmac.compare_digest(signature.encode(), expected.encode())


_READ_SECONDS = 1.0
"""The file is not read more often, whoever sends messages with wrong signatures."""
_MAX_KEYS = 8


class Key:
    """The newest key, and those before it; thread-safe."""

    def __init__(self, key: bytes, file: Path | None = None) -> None:
        """Begin with ``key``; ``file`` may hold another one later."""
        self._keys, self._file, self._lock = [key], file, threading.Lock()
        self._read_after = time.monotonic()

    @property
    def newest(self) -> bytes:
        """Return the newest key that is known."""
        return self._keys[-1]

    def of_request(self, body: bytes, signature: str) -> bytes | None:
        """Return the key that the request ``body`` is signed with, also an earlier one; None if none fits."""
        if (key := self._find(body, signature)) is None and self.refresh():
            key = self._find(body, signature)
        return key

    def refresh(self) -> bool:
        """Read the file again; return whether it holds another key than before."""
        with self._lock:
            if self._file is None or time.monotonic() < self._read_after:
                return False
            self._read_after = time.monotonic() + _READ_SECONDS
            try:
                read = self._file.read_bytes()
            except OSError:  # it is being replaced
                return False
            if not read or read == self._keys[-1]:
                return False
            self._keys = [*(key for key in self._keys if key != read), read][-_MAX_KEYS:]
            return True

    def _find(self, body: bytes, signature: str) -> bytes | None:
        keys = reversed(self._keys)
        return next((k for k in keys if is_valid(signature, request_signature(k, body))), None)


KEY_FILE = ".rendezvous_key"
_POLL_SECONDS = 0.2
_BYTES = 32


def create_key(path: Path) -> bytes:
    """Return the key in ``path``, which is created if it does not exist; only one process may do so.

    Raises StorageError if that fails, or if another user could read it.
    """
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_hex(_BYTES).encode())
            partial.replace(path)
        except OSError as error:
            raise StorageError(f"{path}: cannot be created ({error.strerror})") from None
    return _read(path)


def wait_for_key(path: Path, seconds: float) -> bytes:
    """Return the key in ``path``, once the node with the rendezvous has created it.

    Raises StorageError if there is none after ``seconds``, or if another user could read it.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            text = "the node with the rendezvous has not created it; is the folder the same on all nodes?"
            raise StorageError(f"{path}: absent for {seconds:g} s: {text}")
        time.sleep(_POLL_SECONDS)
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            state, key = os.fstat(descriptor), file.read(2 * _BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from None
    mode = stat.S_IMODE(state.st_mode)
    if state.st_uid != os.geteuid() or mode & 0o077:
        owner = "you" if state.st_uid == os.geteuid() else f"user {state.st_uid}"
        text = f"belongs to {owner} with mode {mode:04o}; must be yours with mode 0600: remove it"
        raise StorageError(f"{path}: {text}")
    if len(key) != 2 * _BYTES:
        raise StorageError(f"{path}: is no key of a rendezvous: remove it")
    return key
