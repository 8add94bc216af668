"""Requests to the API server through the user's kubectl, with the user's connection options."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from re import Match, Pattern
from typing import Any

from fluxtrain.contract.model_base import GROUP
from fluxtrain.contract.resource.fluxtraining import KIND, PLURAL
from fluxtrain.errors import EXIT_ERROR, EXIT_USAGE
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import seconds
from fluxtrain_operator.planner.observed import is_controlled_by

JOBS = f"{PLURAL}.{GROUP}"
"""The resource by its full name: another definition may use the short one."""
_REQUEST_TIMEOUT = "--request-timeout=20s"
"""Of requests for objects, unless the user gives another: kubectl has none by default."""
_STATUSES = '{range .items[*]}{.metadata.namespace}{" "}{.metadata.name}{" "}{.status}{"\\n"}{end}'
_PROCESS_SECONDS = 120.0
_NUM_THREADS = 8


@dataclass(frozen=True)
class Kubectl:
    """Calls kubectl with ``options``, such as --context and --namespace, as the user gave them."""

    options: tuple[str, ...] = ()

    def get(self, resource: str, *arguments: str) -> Manifest:
        """Return an object, or a list of objects. Raises KubectlError."""
        text = self._get(resource, *arguments, "--output=json")
        try:
            result: Manifest = json.loads(text)
        except RecursionError:
            raise KubectlError(f"{resource}: nested too deeply to be read") from None
        return result

    def items(self, resource: str, *arguments: str) -> list[Manifest]:
        """Return the objects of a list. Raises KubectlError."""
        items: list[Manifest] = self.get(resource, *arguments)["items"]
        return items

    def statuses(self, *arguments: str) -> list[Manifest]:
        """Return namespace, name and status of the FluxTrainings. Raises KubectlError.

        Specs are not asked for: one that is nested too deeply to be read would hide all other jobs.
        """
        text = self._get(JOBS, *arguments, f"--output=jsonpath={_STATUSES}")
        rows = [line.split(" ", 2) for line in text.splitlines()]
        return [
            {
                "metadata": {"namespace": namespace, "name": name},
                "status": json.loads(status or "{}"),
            }
            for namespace, name, status in rows
        ]

    def _get(self, *arguments: str) -> str:
        has_timeout = any(option.startswith("--request-timeout") for option in self.options)
        return self.run("get", *arguments, *([] if has_timeout else [_REQUEST_TIMEOUT]))

    def job(self, name: str) -> Manifest:
        """Return the FluxTraining ``name``. Raises KubectlError."""
        try:
            return self.get(JOBS, name)
        except KubectlError as error:
            if not error.not_found:
                raise
            text = f"no FluxTraining {name} in namespace {self._namespace()}"
            raise KubectlError(f"{text}; `kubectl get ft -A` lists all") from None

    def pods(self, job: Manifest, selector: Mapping[str, str]) -> list[Manifest]:
        """Return the pods that ``job`` controls and ``selector`` matches. Raises KubectlError."""
        pods = self.items("pods", f"--selector={names.as_text(selector)}")
        return [pod for pod in pods if is_controlled_by(pod, job["metadata"]["uid"])]

    def _namespace(self) -> str:
        """Return the namespace that the options or the kubeconfig name."""
        given = [o.partition("=")[2] for o in self.options if o.startswith("--namespace=")]
        if given:
            return given[-1]
        return (
            self.run("config", "view", "--minify", "--output=jsonpath={..namespace}") or "default"
        )

    def run(self, *arguments: str, seconds: float = _PROCESS_SECONDS) -> str:
        """Return the output of kubectl; KubectlError if it fails or takes longer than ``seconds``."""
        # options come first: behind "--" they would be part of a command in a pod
        command = [_program(), *self.options, *arguments]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            raise KubectlError(f"kubectl {arguments[0]}: no answer in {seconds:.0f} s") from None
        if done.returncode:
            raise error_of(done.stderr.decode("utf-8", "replace"))
        return done.stdout.decode("utf-8", "replace")

    def run_all(
        self, commands: Iterable[tuple[str, ...]], seconds: float = _PROCESS_SECONDS
    ) -> Iterator[str | KubectlError]:
        """Yield output or error of each of ``commands``, in order; several run at a time."""

        def attempt(arguments: tuple[str, ...]) -> str | KubectlError:
            try:
                return self.run(*arguments, seconds=seconds)
            except KubectlError as error:
                return error

        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            yield from pool.map(attempt, commands)


def _program() -> str:
    """Return the path of kubectl: KUBECTL if set, else the first on the PATH."""
    name = os.environ.get("KUBECTL") or "kubectl"
    program = shutil.which(name)
    if program is None:
        raise KubectlError(f"{name} is not on the PATH; set KUBECTL to its path", EXIT_USAGE)
    return program


_KLOG = re.compile(r"^[EWIF]\d{4} ")
"""Beginning of a line that kubectl's libraries log for developers."""
_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)"'
    r' in API group "(?P<group>[^"]*)"(?: in the namespace "(?P<namespace>[^"]*)")?'
)
_PREFIX = re.compile(r"^(error: )?(Error from server(?: \(\w+\))?: )?", re.IGNORECASE)
_NO_SERVER = "localhost:8080"
"""kubectl's address if neither a kubeconfig nor an option names an API server."""


class KubectlError(Exception):
    """kubectl failed; the text is for people."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR, not_found: bool = False) -> None:
        self.exit_code, self.not_found = exit_code, not_found
        super().__init__(message)


def error_of(stderr: str) -> KubectlError:
    lines = [line for line in stderr.splitlines() if line.strip() and not _KLOG.match(line)]
    text = "\n".join(line for line in lines if not line.startswith("Warning:"))
    for pattern, make in _ERRORS:
        if match := pattern.search(text):
            return make(match, text)
    return KubectlError(_plain(text) or "kubectl failed without a message")


def _plain(text: str) -> str:
    return _PREFIX.sub("", text.strip())


def _forbidden(match: Match[str], text: str) -> KubectlError:
    right = match["resource"] + (f".{match['group']}" if match["group"] else "")
    within = f" in namespace {match['namespace']}" if match["namespace"] else ""
    return KubectlError(
        f"forbidden: user {match['user']} lacks the right to {match['verb']} {right}{within}; "
        "ask for a role that grants it"
    )


def _unreachable(match: Match[str], text: str) -> KubectlError:
    if _NO_SERVER in text:
        message = "no API server: kubectl has no kubeconfig; set KUBECONFIG, or use --kubeconfig or --server"
        return KubectlError(message, EXIT_USAGE)
    return KubectlError(f"the API server cannot be reached: {_plain(text).splitlines()[-1]}")


def _no_definition(match: Match[str], text: str) -> KubectlError:
    if match[1] != PLURAL:
        return KubectlError(f"the cluster does not serve {match[1]}", not_found=True)
    return KubectlError(
        "the cluster does not know FluxTraining: install the operator's chart, which has its definition"
    )


_ERRORS: tuple[tuple[Pattern[str], Callable[[Match[str], str], KubectlError]], ...] = (
    (_FORBIDDEN, _forbidden),
    (
        re.compile(
            r"was refused - did you specify|Unable to connect to the server"
            r"|i/o timeout|context deadline exceeded|request canceled"
        ),
        _unreachable,
    ),
    (
        re.compile(r"You must be logged in to the server"),
        lambda match, text: KubectlError(
            "the API server does not accept the credentials of the kubeconfig"
        ),
    ),
    (re.compile(r'the server doesn\'t have a resource type "([^"]+)"'), _no_definition),
    (
        re.compile(r"\(NotFound\)"),
        lambda match, text: KubectlError(_plain(text), not_found=True),
    ),
    (
        re.compile(
            r"Error in configuration|error loading config|^error: stat |no server found for cluster"
            r"|auth info .* does not exist|context .* does not exist|unable to read client-"
        ),
        lambda match, text: KubectlError(f"kubeconfig: {_plain(text)}", EXIT_USAGE),
    ),
    (
        re.compile(r"Invalid timeout value|unknown flag|invalid argument"),
        lambda match, text: KubectlError(_plain(text).splitlines()[0], EXIT_USAGE),
    ),
)
"""Patterns of kubectl's messages in order: the first that occurs decides."""


_WORKLOADS = "workloads.kueue.x-k8s.io"


@dataclass(frozen=True)
class JobObjects:
    """A job and what belongs to it."""

    job: Manifest
    pods: tuple[Manifest, ...] = ()
    """Pods that the job controls, by name."""
    events: tuple[Manifest, ...] = ()
    """Events about the job and its pods, also those that are gone, oldest first."""
    workload: Manifest | None = None
    """Kueue's workload of the present pods, read if they wait for Kueue."""
    claim: Manifest | None = None
    """The Lease by which a release claims the namespace; empty if there is none, None if unknown."""
    unread: tuple[str, ...] = ()
    """What could not be read, and why."""


def read_job(kubectl: Kubectl, name: str) -> JobObjects:
    """Return the objects of the job ``name``.

    Raises KubectlError if the job cannot be read. What else cannot be read is in ``unread``: a status alone
    says much.
    """
    job = kubectl.job(name)
    unread: list[str] = []
    pods = _list(unread, "pods", lambda: kubectl.pods(job, names.selector(name)))
    events = _list(unread, "events", lambda: kubectl.items("events"))
    return JobObjects(
        job=job,
        pods=tuple(sorted(pods, key=_index)),
        events=events_of(job, events),
        workload=_workload(kubectl, job, pods),
        unread=tuple(unread),
    )


def events_of(job: Manifest, events: list[Manifest]) -> tuple[Manifest, ...]:
    """Return the ``events`` about ``job``, and about pods with the names of its pods, oldest first.

    Events before the job's creation are those of an earlier job with the same name.
    """
    created = seconds(job["metadata"].get("creationTimestamp")) or 0.0
    matching = (event for event in events if _is_about(event.get("involvedObject") or {}, job))
    recent = (event for event in matching if event_time(event) >= created)
    return tuple(sorted(recent, key=event_time))


def event_time(event: Mapping[str, Any]) -> float:
    """Return the Unix time of the last occurrence of ``event``."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return next((time for text in times if (time := seconds(text)) is not None), 0.0)


def _is_about(regarding: Mapping[str, Any], job: Manifest) -> bool:
    name, uid = job["metadata"]["name"], job["metadata"].get("uid")
    if regarding.get("kind") == KIND:
        return regarding.get("name") == name and regarding.get("uid") in (uid, None, "")
    if regarding.get("kind") != "Pod":
        return False
    pod = str(regarding.get("name"))
    number = re.search(r"-(\d{1,9})$", pod)
    return pod == names.pod(name, int(number[1])) if number else names.is_rendezvous(name, pod)


def read_claim(kubectl: Kubectl) -> Manifest | None:
    """Return the Lease by which a release claims the namespace; empty if there is none, None if unknown."""
    try:
        return kubectl.get("leases.coordination.k8s.io", names.CLAIM)
    except KubectlError as error:
        return {} if error.not_found else None


def _index(pod: Manifest) -> tuple[bool, int, str]:
    """Return the sort key of a pod: training pods by number, then the rendezvous pod."""
    text = (pod["metadata"].get("labels") or {}).get(names.LABEL_INDEX, "")
    number = int(text) if text.isdecimal() else -1
    return number < 0, number, pod["metadata"]["name"]


def _list(unread: list[str], what: str, read: Callable[[], list[Manifest]]) -> list[Manifest]:
    try:
        return read()
    except KubectlError as error:
        unread.append(f"{what} ({error})")
        return []


def group_of(job: Manifest) -> str:
    """Return the name of Kueue's pod group, and workload, of the present pods."""
    status = job.get("status") or {}
    number = status.get("groupAttempt") or status.get("attempt", 1)
    return names.kueue_group(job["metadata"]["name"], number)


def _workload(kubectl: Kubectl, job: Manifest, pods: list[Manifest]) -> Manifest | None:
    gates = (gate for pod in pods for gate in pod["spec"].get("schedulingGates") or ())
    if not any(gate.get("name") in names.KUEUE_GATES for gate in gates):
        return None
    try:
        return kubectl.get(_WORKLOADS, group_of(job))
    except KubectlError:
        return None  # its absence is no news: the gate says what is waited for


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` of equally many cells with aligned columns, as kubectl prints them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def printable(text: str) -> str:
    """Return ``text`` with control characters but line ends escaped.

    Messages in a status come from programs of others: they must not control the terminal.
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
