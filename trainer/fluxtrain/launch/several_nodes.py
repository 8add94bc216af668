"""``fluxtrain run --nodes``: one node of a run on several nodes, started by hand or by Slurm.

One node serves the rendezvous, all run torchrun's agent, as in pods. No operator acts: a node that is stopped
or gives up leaves, and the others continue if they are enough, or wait for it. An error that every node would
find ends all of them with its exit code.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousInfo

from fluxtrain import __version__
from fluxtrain.contract.model_base import iter_fields
from fluxtrain.contract.process import CONFIG_FILE, LOST_SECONDS, RunPaths, agent_name
from fluxtrain.contract.run.config import RunConfig, value_at
from fluxtrain.errors import (
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_USAGE,
    ConfigError,
    FluxtrainError,
    NodesError,
    RefusedError,
    StorageError,
)
from fluxtrain.launch import torchrun
from fluxtrain.launch.agent import joined, launch_until_done, raise_on_sigterm
from fluxtrain.launch.nodes import Endpoint, Nodes, find_endpoint, interface_of, serves
from fluxtrain.launch.rendezvous_handler import BACKEND, MembershipRendezvous
from fluxtrain.launch.torchrun import FatalTrainerError, Peers, raise_on_fatal_error
from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.http_server import host_port
from fluxtrain.rendezvous.membership import Limits
from fluxtrain.rendezvous.messages import KEY_FILE, Heartbeat, Key, Reply, create_key, wait_for_key
from fluxtrain.rendezvous.service import Admission, Sessions, serve

_OF_ALL = (EXIT_USAGE, EXIT_DIVERGED, EXIT_STORAGE)
"""Exit codes of errors that every node would find: one that finds one ends the run."""
_LINGER_SECONDS = 5.0
"""How long an ended rendezvous still answers, so that all nodes hear of the end; usually a second."""


def run(
    config: RunConfig, paths: RunPaths, processes: int, nodes: Nodes, max_restarts: int
) -> tuple[int, str]:
    """Run the task on this node, together with the others; return the exit code and a message.

    Raises ConfigError, StorageError, RefusedError or NodesError if this node cannot take part.
    """
    endpoint = find_endpoint(nodes)
    counts = [number * processes for number in nodes.sizes()]
    torchrun.check_before_starting(config, paths, counts)
    # what the trainers of all nodes must have in common
    digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]
    setup = f"fluxtrain {__version__} with {processes} processes and config {digest}"
    arguments = [
        f"--nnodes={nodes.min_nodes}:{nodes.wanted_nodes}",
        f"--nproc-per-node={processes}",
        f"--rdzv-backend={BACKEND}",
        f"--rdzv-id={uuid4().hex}",
        f"--rdzv-endpoint={nodes.endpoint}",
        f"--max-restarts={max_restarts}",
    ]
    try:
        with raise_on_sigterm():
            if not serves(nodes, endpoint):
                key = wait_for_key(paths.output / KEY_FILE, nodes.timeout_seconds)
                rendezvous = _rendezvous(nodes, endpoint, key, setup, is_first=False)
                return _train(config, paths, nodes, rendezvous, arguments, _OF_ALL)
            with _service(config, paths, nodes, endpoint, setup) as (key, sessions):
                rendezvous = _rendezvous(nodes, endpoint, key, setup, is_first=True)
                of_all = (*_OF_ALL, EXIT_STOPPED, EXIT_INTERRUPTED)  # it takes the rendezvous along
                code, message = _train(config, paths, nodes, rendezvous, arguments, of_all)
                _serve_others(sessions, code)
                return code, message
    except SignalException:
        return EXIT_STOPPED, "stopped before training began"


@contextmanager
def _service(
    config: RunConfig, paths: RunPaths, nodes: Nodes, endpoint: Endpoint, setup: str
) -> Iterator[tuple[bytes, Sessions]]:
    """Serve the rendezvous, with the output locked and the config written; yield its key and sessions."""
    with torchrun.lock_output(paths.output):
        torchrun.write_config(config, paths.output)
        key = create_key(paths.output / KEY_FILE)
        limits = Limits(nodes.min_nodes, nodes.wanted_nodes, unheard_seconds=LOST_SECONDS)
        sessions = Sessions(limits, admission=Admission(setup))
        try:
            server = serve(sessions, Key(key), endpoint.address, nodes.port)
        except StorageError as error:
            raise ConfigError("--rendezvous", nodes.endpoint, str(error)) from None
        print(
            f"fluxtrain: rendezvous at {host_port(endpoint.address, nodes.port)}", file=sys.stderr
        )
        try:
            yield key, sessions
        finally:
            server.stop()


def _rendezvous(
    nodes: Nodes, endpoint: Endpoint, key: bytes, setup: str, is_first: bool
) -> NodeRendezvous:
    hostname = socket.gethostname()
    agent = agent_name(hostname, f"{os.getpid()}-{uuid4().hex[:12]}")
    order = nodes.rank if nodes.rank is not None else int(not is_first)
    beat = Heartbeat(
        sequence=0,
        attempt=1,
        agent=agent,
        node=f"{order}/{hostname}",
        node_name=hostname,
        node_rank=nodes.rank,
        setup=setup,
    )
    client = Client(endpoint.address, nodes.port, Key(key), beat)
    return NodeRendezvous(client, agent, endpoint.own_address, nodes)


def _train(
    config: RunConfig,
    paths: RunPaths,
    nodes: Nodes,
    rendezvous: NodeRendezvous,
    arguments: list[str],
    of_all: Collection[int],
) -> tuple[int, str]:
    """Train with the others until this node is done; its exit codes ``of_all`` end the run on all nodes."""
    node = "" if nodes.rank is None else str(nodes.rank)
    with (
        TemporaryDirectory() as folder,
        torchrun.snapshot_volume(config, paths, node) as volume,
        joined(rendezvous) as peers,
    ):
        path = Path(folder) / CONFIG_FILE
        path.write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
        count = nodes.min_nodes, nodes.wanted_nodes
        torchrun.prepare_environment(path, replace(paths, snapshots=volume, num_nodes=count))
        if interface := interface_of(rendezvous.local_address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        with raise_on_fatal_error(Path(folder) / "error.json"):
            code, message = _run_until_done(config, paths, rendezvous, peers, arguments)
        if code in of_all:
            rendezvous.end_for_all(code)
    return code, message


def _run_until_done(
    config: RunConfig,
    paths: RunPaths,
    rendezvous: NodeRendezvous,
    peers: Peers,
    arguments: list[str],
) -> tuple[int, str]:
    try:
        return launch_until_done(arguments, paths, peers, ends_if_closed=True)
    except RendezvousClosedError:
        return rendezvous.closed_code(), "another node has ended the run: see its output"
    except FatalTrainerError as error:
        return error.code, error.message
    except RefusedError as error:
        return error.exit_code, f"{error}{_differences(config, paths.output / CONFIG_FILE)}"
    except FluxtrainError as error:
        return error.exit_code, str(error)


def _differences(config: RunConfig, other: Path) -> str:
    """Return the fields of ``config`` that differ from the config in the file ``other``, as a clause."""
    try:
        theirs = json.loads(other.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    ours = torchrun.as_written(config).model_dump(mode="json")
    paths = [field.path for field in iter_fields(RunConfig)]
    names = [path for path in paths if value_at(ours, path) != value_at(theirs, path)]
    return f"; these fields differ: {', '.join(names[:5])}" if names else ""


def _serve_others(sessions: Sessions, code: int) -> None:
    """Serve until the other nodes have ended; only a moment if this node was stopped or ended the run."""
    if code in (EXIT_OK, EXIT_STOPPED, EXIT_INTERRUPTED, *_OF_ALL):
        sessions.close(code)
        deadline = time.monotonic() + _LINGER_SECONDS
        while sessions.members()["alive"] and time.monotonic() < deadline:
            time.sleep(0.1)
        return
    text = "this node no longer trains; it serves the rendezvous until the others have ended"
    print(f"fluxtrain: {text}", file=sys.stderr, flush=True)
    while sessions.members()["alive"]:
        time.sleep(1)


_REFUSED_SECONDS = 2 * LOST_SECONDS
"""The rank of a node that was killed is free again before."""


class NodeRendezvous(MembershipRendezvous):
    """Joins generations like an agent in a pod, but not for ever."""

    def __init__(self, client: Client, agent: str, local_address: str, nodes: Nodes) -> None:
        """Wait for as many ``nodes``, and as long, as they say."""
        super().__init__(client, agent, local_address)
        self.local_address, self._nodes = local_address, nodes
        self._since = time.monotonic()
        self._told = ""

    def closed_code(self) -> int:
        """Return the exit code of all nodes, once the run has ended."""
        reply = self.client.reply
        return EXIT_ERROR if reply is None else reply.exit_code

    def end_for_all(self, code: int) -> None:
        """End the run on all nodes with the exit ``code``."""
        self.client.update(closing=True, exit_code=code)

    def _join(self) -> tuple[str, ...]:
        self._since, self._told = time.monotonic(), ""
        return super()._join()

    def _while_waiting(self, reply: Reply | None) -> None:
        """Print what is waited for; RefusedError or NodesError if it does not come."""
        now = time.monotonic()
        if reply is not None and self._agent in reply.world:
            return  # of a generation that has just formed
        if reply is not None and reply.refused and now - self._since > _REFUSED_SECONDS:
            raise RefusedError(reply.refused)
        if reply is not None and reply.generation > 0 and not reply.broken:
            self._since = now  # the job trains, and needs no further node at present
        missing = self._missing(reply)
        if now - self._since > self._nodes.timeout_seconds:
            raise NodesError(f"{missing}, for {self._nodes.timeout_seconds:g} s")
        if missing != self._told:
            print(f"fluxtrain: {missing}", file=sys.stderr, flush=True)
            self._told = missing

    def _missing(self, reply: Reply | None) -> str:
        if reply is None or self.client.problem:
            return f"no answer of the rendezvous at {self._nodes.endpoint} ({self.client.problem})"
        if reply.refused:
            return reply.refused
        wanted = self._nodes.wanted_nodes
        fewest = "" if wanted == self._nodes.min_nodes else f"; {self._nodes.min_nodes} are enough"
        return f"{reply.waiting} of {wanted} nodes have come to the rendezvous{fewest}"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a generation with this node, and print its size."""
        info = super().next_rendezvous()
        text = f"world of {info.world_size} nodes; this is node {info.rank}"
        print(f"fluxtrain: {text}", file=sys.stderr, flush=True)
        return info
