"""Options: what the operator's command line and environment say."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    image: str
    namespaces: tuple[str, ...]
    lease_namespace: str
    lease_name: str
    identity: str
    address: str
    port: int


def parse(arguments: list[str] | None) -> Options:
    """Return the options; every one can also be set by an environment variable."""
    get = os.environ.get
    parser = argparse.ArgumentParser(
        prog="fluxtrain_operator",
        allow_abbrev=False,
        description="Reconcile FluxTrainings: win the election, watch, act.",
    )
    parser.add_argument("--image", default=get("FLUXTRAIN_IMAGE", ""), help="default trainer image")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[name for name in get("FLUXTRAIN_NAMESPACES", "").split(",") if name],
        help="watch only this one; may be given several times (default: all)",
    )
    parser.add_argument("--lease-namespace", default=get("POD_NAMESPACE", "default"))
    parser.add_argument("--lease-name", default="fluxtrain-operator")
    parser.add_argument("--identity", default=get("POD_NAME", socket.gethostname()))
    parser.add_argument("--address", default="0.0.0.0", help="address of /metrics and the probes")
    parser.add_argument("--port", type=int, default=8080)
    found = parser.parse_args(arguments)
    if not found.image:
        parser.error("--image or FLUXTRAIN_IMAGE must name the default trainer image")
    return Options(
        found.image,
        tuple(found.namespace),
        found.lease_namespace,
        found.lease_name,
        found.identity,
        found.address,
        found.port,
    )
