"""Operator processes on a fake API server; forked, so that they need not import anything."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.operator import crowd
from benchmarks.operator.fake_api_server import FakeApiServer, serving
from kubernetes.aio.config import kube_config

from fluxtrain_operator import operate  # noqa: F401  # forked processes need not import it
from fluxtrain_operator.__main__ import main

TIMEOUT_SECONDS = 120
LEASE = ("default", "fluxtrain-operator")


def _run(kubeconfig: Path) -> None:
    gc.freeze()
    warnings.simplefilter("ignore")
    os.environ["KUBECONFIG"] = kube_config.KUBE_CONFIG_DEFAULT_LOCATION = str(kubeconfig)
    sys.argv[1:] = [f"--image={crowd.IMAGE}", "--address=127.0.0.1", "--port=0"]
    sys.exit(main())


@asynccontextmanager
async def replica(kubeconfig: Path) -> AsyncIterator[BaseProcess]:
    """Yield an operator process; kill it at the end."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(kubeconfig,))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@asynccontextmanager
async def leader(server: FakeApiServer, folder: Path) -> AsyncIterator[BaseProcess]:
    """Yield an operator process that holds the Lease."""
    async with serving(server, folder) as kubeconfig, replica(kubeconfig) as process:
        await until(lambda: bool(holder(server)), process)
        yield process


def holder(server: FakeApiServer) -> str:
    """Return the identity of the leader; empty if there is none."""
    lease: dict[str, Any] = server.of("leases").objects.get(LEASE, {"spec": {}})
    return str(lease["spec"].get("holderIdentity") or "")


async def until(holds: Callable[[], bool], process: BaseProcess) -> None:
    """Wait until ``holds`` returns true; ``process`` must not end before."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not holds():
            assert process.is_alive(), "the operator has exited"
            await asyncio.sleep(0.02)


async def exit_code(process: BaseProcess) -> int:
    """Wait for the end of ``process``; return its exit code."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while process.exitcode is None:
            await asyncio.sleep(0.02)
    return process.exitcode
