"""Watch: threads that record the steps of a job and all reports about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.client import HTTPException

from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from tests.api_server.client import Kubectl
from tests.faults.fault import NEW_POD, Seen, Sign
from tests.faults.target import Target, fetch_members

STEP_POLL_SECONDS, POLL_SECONDS = 0.05, 0.3
GOOD = (
    "Progressing=True",
    "Healthy=True",
    "Ready=True",
    "Training=True",
    "Stalled=False",
    "Reconciling=False",
)
"""Conditions that report no fault."""


class Watch:
    """Records what a job does and what is reported about it, until it is closed."""

    def __init__(self, target: Target) -> None:
        """Begin to record."""
        self.steps: list[Seen] = []
        self.signs: list[Sign] = []
        self._target = target
        # a client has one connection, which threads cannot share
        self._kubectl = Kubectl(target.kubectl.kubeconfig)
        self._address = ""
        self._generation: int | None = None
        self._lost: set[str] = set()
        self._seen: dict[str, set[str]] = {}
        self._closed = threading.Event()
        self._threads = [
            self._start(self._poll_step, STEP_POLL_SECONDS),
            self._start(self._poll_members, POLL_SECONDS),
            self._start(self._poll_api, POLL_SECONDS),
        ]

    def close(self) -> None:
        """Stop recording."""
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._kubectl.server.close()

    def _start(self, poll: Callable[[], None], every: float) -> threading.Thread:
        def run() -> None:
            while not self._closed.wait(every):
                try:
                    poll()
                except (OSError, ValueError, KeyError, HTTPException, ClusterError):
                    continue  # what is polled is disturbed

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _poll_step(self) -> None:
        step = self._target.step
        if not self.steps or step != self.steps[-1].step:
            self.steps.append(Seen(time.monotonic(), step))

    def _poll_members(self) -> None:
        if not self._address:
            return
        members = fetch_members(self._address)
        generation, lost = int(members["generation"]), set(members["lostSeconds"])
        if self._generation is not None and generation > self._generation:
            self._report(f"generation {generation}")
        if self._generation is not None and lost - self._lost:
            self._report("agent lost")
        self._generation, self._lost = max(generation, self._generation or 0), lost

    def _poll_api(self) -> None:
        here, name = self._target.jobs.here, self._target.name
        pods = self._kubectl.get("pods", f"--selector=fluxtrain.dev/job={name}", here)["items"]
        self._poll_pods(pods)
        status = self._kubectl.get("ft", name, here).get("status", {})
        conditions = {
            f"{c['type']}={c['status']} {c['reason']}" for c in status.get("conditions", [])
        }
        self._report_new("condition", {each for each in conditions if not each.startswith(GOOD)})
        events = self._kubectl.get("events.events.k8s.io", here)["items"]
        self._report_new("event", {_event(e) for e in events if _is_of(e, name)})

    def _poll_pods(self, pods: list[Manifest]) -> None:
        created = {f"{p['metadata']['name']} {p['metadata']['uid']}" for p in pods}
        self._report_new(NEW_POD, created)
        for pod in pods:
            if pod["metadata"]["name"].endswith("-rendezvous"):
                self._address = pod.get("status", {}).get("podIP", "") or self._address

    def _report_new(self, kind: str, values: set[str]) -> None:
        """Report those of ``values`` that the last poll did not see; none at the first poll."""
        before = self._seen.get(kind)
        self._seen[kind] = values
        for value in sorted(values - (values if before is None else before)):
            self._report(value if kind == "condition" else f"{kind} {value.split(' ')[0]}")

    def _report(self, text: str) -> None:
        self.signs.append(Sign(time.monotonic(), text))


def _is_of(event: Manifest, name: str) -> bool:
    about = event.get("regarding", {})
    return about.get("kind") == "FluxTraining" and about.get("name") == name


def _event(event: Manifest) -> str:
    return f"{event.get('reason')} {event['metadata']['uid']}"
