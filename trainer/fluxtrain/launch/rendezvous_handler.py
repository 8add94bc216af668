"""torch's RendezvousHandler on the job's rendezvous service: torchrun's agent is unchanged."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.messages import MAX_RANKS, MAX_STACK, RankReport, Reply, Restart
from fluxtrain.report.progress import RankProgress

BACKEND = "fluxtrain"
_STORE_TIMEOUT = timedelta(seconds=20)
"""How long agents of a new generation wait for each other's ranks; usually milliseconds."""
_POLL_SECONDS = 1.0
_MAX_RESTARTS = 16
"""Restarts that an agent repeats; the operator has counted those before."""
_LEFT_SECONDS = 5
"""For the last files of trainers whose peers have left."""
_HUNG_SECONDS = 1
"""For trainers that hang, which do not end by themselves."""


class MembershipRendezvous(RendezvousHandler):
    """Joins the generations that the rendezvous service forms.

    The TCPStore of a generation, for the exchange of ranks, is opened by the agent of rank 0.
    """

    def __init__(self, client: Client, agent: str, local_address: str) -> None:
        """Use ``client``, which sends heartbeats of ``agent``; stores listen on ``local_address``."""
        self.client, self._agent, self._address = client, agent, local_address
        self._generation, self._run_id = 0, ""
        self._trained: tuple[int, frozenset[str]] = 0, frozenset()
        """The generation that trainers of this agent ran in last, and its agents."""
        self._failure: str | None = None
        self._was_interrupted = False
        self._restarts: tuple[Restart, ...] = ()
        self._store: Store | None = None

    def attach(self, parameters: RendezvousParameters) -> MembershipRendezvous:
        """Return this handler for one run of torchrun."""
        self._run_id = parameters.run_id
        return self

    def get_backend(self) -> str:
        """Return torchrun's name of this rendezvous."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return torchrun's ``--rdzv-id``."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a generation with this agent and return its store and ranks.

        Raises RendezvousClosedError if the attempt has ended.
        """
        while True:
            self._store = None
            world = self._join()
            rank = world.index(self._agent)
            store = self._open_store() if rank == 0 else self._connect()
            if store is None:
                continue
            self._store = store
            self._tell_restart(world)
            info = RendezvousStoreInfo.build(rank, store, self._address)
            return RendezvousInfo(store, rank, len(world), info)

    def _join(self) -> tuple[str, ...]:
        """Return the world of the next generation that this agent is in."""
        self.client.update(joining=True, generation=self._generation, store="")
        while True:
            reply = self.client.next_reply(_POLL_SECONDS)
            self._while_waiting(reply)
            if reply is None:
                continue
            if reply.closed:
                raise RendezvousClosedError("the attempt has ended")
            if reply.generation > self._generation and self._agent in reply.world:
                self._generation = reply.generation
                self.client.update(
                    joining=False, generation=reply.generation, world=reply.world, store=""
                )
                return reply.world

    def _while_waiting(self, reply: Reply | None) -> None:
        """Look at the newest ``reply`` while the agent waits for a generation; may raise to end the wait.

        An agent in a pod waits for ever: the operator decides.
        """

    def _open_store(self) -> Store:
        server = TCPStore(
            self._address, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT
        )
        self.client.update(store=f"{self._address}:{server.port}")
        return PrefixStore(str(self._generation), server)

    def _connect(self) -> Store | None:
        """Return the store of the generation, None if the generation is over before it can be reached."""
        while True:
            reply = self.client.next_reply(_POLL_SECONDS)
            if reply is None:
                continue
            if self._must_reform(reply):
                return None
            if reply.store and reply.generation == self._generation:
                host, _, port = reply.store.rpartition(":")
                try:
                    client = TCPStore(host, int(port), is_master=False, timeout=_STORE_TIMEOUT)
                    return PrefixStore(str(self._generation), client)
                except DistError:  # rank 0's agent was lost; the service notices as well
                    time.sleep(_POLL_SECONDS)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the trainers must be stopped for another generation, else 0."""
        reply = self.client.reply
        return int(reply is not None and self._must_reform(reply))

    def stop_seconds(self) -> int | None:
        """Return the seconds from SIGTERM to SIGKILL of the trainers; None if no rank of theirs is missing.

        Without one their collectives cannot end. If all ranks stopped together, they end by themselves.
        """
        reply = self.client.reply
        if self._was_ended(self._generation):
            return _HUNG_SECONDS
        if reply is None or not (reply.broken or reply.generation > self._generation):
            return None
        return 0 if reply.lost else _LEFT_SECONDS

    def _must_reform(self, reply: Reply) -> bool:
        return reply.reform or reply.generation > self._generation

    def _was_ended(self, generation: int) -> bool:
        reply = self.client.reply
        return reply is not None and 0 < generation <= reply.ended

    @property
    def generation(self) -> int:
        """Return the generation that the trainers run in."""
        return self._generation

    def was_interrupted(self) -> bool:
        """Return whether the generation before lost an agent, or was ended by the operator."""
        return self._was_interrupted

    def trainers_failed(self, cause: str) -> None:
        """Note that the trainers failed by ``cause``: a restart, unless the generation was interrupted."""
        self._failure = cause

    def _tell_restart(self, world: tuple[str, ...]) -> None:
        """Tell the restart between the generation of the last trainers and the present one, if it is one.

        No later generation can end by a failure before the service has heard of it: its ranks are exchanged
        only now.
        """
        generation, agents = self._trained
        self._was_interrupted = not agents <= set(world) or self._was_ended(generation)
        if self._failure is not None and generation and not self._was_interrupted:
            restart = Restart(generation=generation, cause=self._failure)
            self._restarts = (*self._restarts, restart)[-_MAX_RESTARTS:]
            self.client.update(restarts=self._restarts)
        self._failure = None
        self._trained = self._generation, frozenset(world)

    def report_progress(self, ranks: Sequence[RankProgress]) -> None:
        """Report the progress of this node's trainers with the heartbeats."""
        step, now = max((rank.step for rank in ranks), default=0), time.monotonic()
        reports = tuple(_rank_report(rank, now) for rank in ranks[:MAX_RANKS])
        self.client.update(step=step, ranks=reports)

    def is_closed(self) -> bool:
        """Return whether the attempt has ended."""
        reply = self.client.reply
        return reply is not None and reply.closed

    def set_closed(self) -> None:
        """End the attempt for all agents."""
        self.client.update(closing=True)

    def shutdown(self) -> bool:
        """End the attempt for all agents if the trainers succeeded.

        After an error this agent leaves or joins again: the others form a generation without it, or with the
        agent of the pod that replaces this one.
        """
        if sys.exc_info()[1] is None:
            self.client.update(closing=True, succeeded=True)
        return True


def _rank_report(rank: RankProgress, now: float) -> RankReport:
    return RankReport(
        rank=rank.rank,
        phase=rank.phase,
        step=rank.step,
        seconds_since_progress=round(rank.seconds_since_progress(now), 1),
        step_seconds=rank.step_seconds,
        stack=rank.stack[:MAX_STACK],
        frozen=rank.frozen,
        generation=rank.generation,
    )


def register(handler: MembershipRendezvous) -> None:
    """Register ``handler`` with torchrun as `BACKEND`."""
    rendezvous_handler_registry.register(BACKEND, handler.attach)
