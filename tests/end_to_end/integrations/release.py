"""A release in a registry, its images in all nodes, and Helm, which installs the chart with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.commands import run
from cluster.kubectl import NO_PROXY
from cluster.layout import nodes
from cluster.nodes import checkout, containerd, images
from cluster.programs import binaries
from tests.chart.release.registry import VERSION, push_chart, push_image
from tests.paths import ROOT

CHART = ROOT / "charts" / "fluxtrain-operator"
NEXT_TAG = "next"


@dataclass(frozen=True)
class Helm:
    """Helm with one kubeconfig and its own home folder."""

    kubeconfig: Path
    home: Path
    program: Path | None = None
    """That of the cluster unless given."""

    def __call__(self, *arguments: str | Path, seconds: float = 180) -> str:
        """Return what ``helm ARGUMENTS`` prints; ClusterError with its message if it fails."""
        homes = {f"HELM_{kind}_HOME": str(self.home / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        env = {"KUBECONFIG": str(self.kubeconfig), "NO_PROXY": NO_PROXY, **homes}
        return run([self.program or binaries.path("helm"), *arguments], env=env, seconds=seconds)


def publish(registry: str, context: Path) -> None:
    """Push the chart and both images to ``registry``; pull the images into all nodes, the operator's twice.

    Nodes have no resolver of registries without TLS, so that containerd is told to pull.
    """
    push_chart(registry, context)
    checkout.write_context(context)
    for what, (volume, pip) in checkout.mounted().items():
        options = f"--volume={volume} --build-arg='PIP_OPTIONS={pip}'"
        push_image(what, registry, context, options)
        name = f"{registry}/fluxtrain/{what}:{VERSION}"
        for node in nodes():
            containerd.ctr(node, "images", "pull", "--plain-http", name)
    operator = f"{registry}/fluxtrain/operator"
    images.tag(f"{operator}:{VERSION}", f"{operator}:{NEXT_TAG}")
