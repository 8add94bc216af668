"""A real Prometheus on this machine that scrapes real pods with manifests/prometheus.yaml.

Debian's build has no Kubernetes service discovery: the targets, with the same meta labels, are written to a
file instead.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from cluster.free_ports import free_port
from cluster.kubectl import Manifest
from tests.end_to_end.stage import wait_for
from tests.paths import ROOT

SCRAPE_SECONDS = 1
_ALERTS = ROOT / "charts" / "fluxtrain-operator" / "files" / "alerts.yaml"
_META = "__meta_kubernetes"


class Prometheus:
    """A Prometheus that listens on 127.0.0.1, on a free port."""

    def __init__(self, program: Path, folder: Path) -> None:
        """Keep configuration, targets and data in ``folder``."""
        self._program, self._folder = program, folder
        self._targets = folder / "targets.json"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._folder.mkdir()
        self.set_targets([])
        (self._folder / "prometheus.yaml").write_text(yaml.safe_dump(self._configuration()))
        self.port = free_port()
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )
        wait_for(self._is_ready, lambda: (self._folder / "prometheus.log").read_text(), seconds=30)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=20)

    def set_targets(self, targets: Iterable[Manifest]) -> None:
        """Scrape ``targets`` from now on."""
        partial = self._targets.with_suffix(".partial")
        partial.write_text(json.dumps(list(targets)))
        partial.replace(self._targets)  # Prometheus watches the file

    def values(self, label: str, selector: str) -> set[str]:
        """Return the values of ``label``, as Grafana queries those of a variable."""
        return set(self._get(f"label/{label}/values", **{"match[]": selector}))

    def rules(self) -> list[tuple[str, str, str]]:
        """Return name, state and health of each alert."""
        groups = self._get("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return [(rule["name"], rule["state"], rule["health"]) for rule in rules]

    def _get(self, path: str, **parameters: object) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"{self.url}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=20) as response:
            return json.load(response)["data"]

    def _is_ready(self) -> bool:
        try:
            self._get("status/runtimeinfo")
        except OSError:
            return False
        return True

    def _configuration(self) -> Manifest:
        """Return the published configuration with the intervals of a test."""
        config = yaml.safe_load((ROOT / "manifests" / "prometheus.yaml").read_text())
        for job in config["scrape_configs"]:
            del job["kubernetes_sd_configs"]
            job["file_sd_configs"] = [{"files": [str(self._targets)]}]
        interval = f"{SCRAPE_SECONDS}s"
        config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
        return {**config, "rule_files": [str(_ALERTS)]}


def targets_of(pod: Manifest) -> Iterator[Manifest]:
    """Yield the targets of a pod, one for each port, as from Kubernetes' service discovery."""
    metadata, status = pod["metadata"], pod.get("status", {})
    if "podIP" not in status:
        return
    labels = {
        f"{_META}_namespace": metadata["namespace"],
        f"{_META}_pod_name": metadata["name"],
        f"{_META}_pod_phase": status["phase"],
    }
    for key, value in metadata["labels"].items():
        labels[f"{_META}_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}"] = value
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            name = {f"{_META}_pod_container_port_name": port["name"]}
            yield {
                "targets": [f"{status['podIP']}:{port['containerPort']}"],
                "labels": {**labels, **name},
            }
