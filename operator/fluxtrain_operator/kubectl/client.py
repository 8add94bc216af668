"""Requests to the API server through the user's kubectl, with the user's connection options."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import PLURAL
from fluxtrain.errors import EXIT_USAGE
from fluxtrain_operator import names
from fluxtrain_operator.job import Manifest
from fluxtrain_operator.kubectl.errors import KubectlError, error_of
from fluxtrain_operator.planner.owner_references import is_controlled_by

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
