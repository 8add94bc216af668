"""The chart of a release goes into a registry of OCI artifacts, and comes out of it the same."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from cluster.free_ports import free_port
from supply_chain.release import write_chart
from tests.chart.conftest import of_debian, tool
from tests.chart.objects import CHART, Program
from tests.paths import ROOT

VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
ARCHIVE = f"{CHART.name}-{VERSION}.tgz"
START_SECONDS = 30


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Return the address of a registry on the loopback, with its store in a folder of the test."""
    program, address = of_debian("docker-registry", "docker-registry"), f"127.0.0.1:{free_port()}"
    settings = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "store")}},
        "http": {"addr": address},
    }
    (tmp_path / "registry.yaml").write_text(yaml.safe_dump(settings))
    with subprocess.Popen([program, "serve", tmp_path / "registry.yaml"]) as process:
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


def test_the_chart_of_a_registry_is_the_released_one(
    helm: Program, registry: str, tmp_path: Path
) -> None:
    write_chart(CHART, tmp_path / ARCHIVE, 1_700_000_000)
    command = [
        "make",
        "--silent",
        "push-chart",
        f"REGISTRY={registry}",
        "HELM_OPTIONS=--plain-http",
    ]
    command += [f"HELM={tool('helm')}", f"RELEASE={tmp_path}"]
    pushed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (tmp_path / "pulled").mkdir()
    address = f"oci://{registry}/charts/{CHART.name}"
    place = ("--version", VERSION, "--plain-http")
    pulled = helm("pull", address, *place, f"--destination={tmp_path}/pulled")
    assert digest_of(pushed) == digest_of(pulled)
    assert (tmp_path / "pulled" / ARCHIVE).read_bytes() == (tmp_path / ARCHIVE).read_bytes()

    def objects(chart: str | Path, *options: str) -> list[object]:
        text = helm("template", "x", chart, *options).stdout
        return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each and "kind" in each]

    from_registry = objects(address, *place)
    assert from_registry
    assert from_registry == objects(CHART)


def digest_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the digest that helm prints of an artifact."""
    return next(
        word
        for line in (done.stdout + done.stderr).splitlines()
        for word in line.split()
        if word.startswith("sha256:")
    )
