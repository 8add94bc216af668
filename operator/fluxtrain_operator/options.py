"""Options: what the operator's command line and environment say."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass

_LARGEST_GROUP = 2**31 - 1  # as Kubernetes has them


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
    supplemental_groups: tuple[int, ...] = ()


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
        default=_words(get("FLUXTRAIN_NAMESPACES", "")),
        help="watch only this one; may be given several times (default: all)",
    )
    parser.add_argument("--lease-namespace", default=get("POD_NAMESPACE", "default"))
    parser.add_argument("--lease-name", default="fluxtrain-operator")
    parser.add_argument("--identity", default=get("POD_NAME", socket.gethostname()))
    parser.add_argument("--address", default="0.0.0.0", help="address of /metrics and the probes")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument(
        "--supplemental-group",
        action="append",
        default=_words(get("FLUXTRAIN_SUPPLEMENTAL_GROUPS", "")),
        help="group id of training pods with GPUs, such as the nodes' render; may be given several times",
    )
    found = parser.parse_args(arguments)
    if not found.image:
        parser.error("--image or FLUXTRAIN_IMAGE must name the default trainer image")
    wrong = [text for text in found.supplemental_group if not _is_group(text)]
    if wrong:
        parser.error(
            f"--supplemental-group or FLUXTRAIN_SUPPLEMENTAL_GROUPS: {wrong[0]!r} is no group id "
            f"from 0 to {_LARGEST_GROUP}"
        )
    return Options(
        found.image,
        tuple(found.namespace),
        found.lease_namespace,
        found.lease_name,
        found.identity,
        found.address,
        found.port,
        tuple(map(int, found.supplemental_group)),
    )


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _is_group(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= _LARGEST_GROUP
