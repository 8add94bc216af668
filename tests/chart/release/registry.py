"""Debian's registry of OCI artifacts, without TLS, on an address of this machine; pushes into it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import yaml
from cluster.free_ports import free_port
from cluster.nodes import images
from supply_chain.release import write_chart
from tests.chart.conftest import of_debian, tool
from tests.chart.objects import CHART
from tests.paths import ROOT

START_SECONDS = 30
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
ARCHIVE = f"{CHART.name}-{VERSION}.tgz"


@contextmanager
def serve(host: str, folder: Path) -> Iterator[str]:
    """Yield the address of a registry, with its store in ``folder``."""
    program, address = of_debian("docker-registry", "docker-registry"), f"{host}:{free_port()}"
    settings = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "store")}},
        "http": {"addr": address},
    }
    (folder / "registry.yaml").write_text(yaml.safe_dump(settings))
    with subprocess.Popen([program, "serve", folder / "registry.yaml"]) as process:
        try:
            await_answer(f"http://{address}/v2/")
            yield address
        finally:
            process.terminate()


def await_answer(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urlopen(url, timeout=1).close()
        except (URLError, ConnectionError):
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.05)
        else:
            return


def push_chart(registry: str, folder: Path) -> str:
    """Write the chart's archive into ``folder`` and push it; return what helm prints."""
    write_chart(CHART, folder / ARCHIVE, 1_700_000_000)
    settings = ("HELM_OPTIONS=--plain-http", f"HELM={tool('helm')}", f"RELEASE={folder}")
    return _make("push-chart", registry, *settings)


def push_image(what: str, registry: str, context: Path, options: str) -> None:
    """Build ``what``, operator or trainer on the cluster's base image with buildah's ``options``; push it."""
    images.pull_base()
    _make(
        "push-image",
        registry,
        f"IMAGE={what}",
        f"BUILDAH={' '.join(map(str, images.buildah()))}",
        f"BUILD_OPTIONS=--layers --build-arg=BASE={images.BASE_IMAGE} {options}",
        "PUSH_OPTIONS=--tls-verify=false",
        f"CONTEXT={context}",
    )


def _make(target: str, registry: str, *settings: str) -> str:
    command = ["make", "--silent", target, f"REGISTRY={registry}", *settings]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **images.BUILD_ENV},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
