"""The operator's options, from command line and environment."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass

from fluxtrain_operator.log_format import LOG_FORMATS, LogFormat

_MAX_GROUP_ID = 2**31 - 1  # the limit of Kubernetes


@dataclass(frozen=True)
class Options:
    """Parsed options."""

    image: str
    namespaces: tuple[str, ...]
    lease_namespace: str
    lease_name: str
    identity: str
    address: str
    port: int
    supplemental_groups: tuple[int, ...] = ()
    log_format: LogFormat = "json"


def parse(arguments: list[str] | None) -> Options:
    """Return the options in ``arguments``, or of the process; environment variables give the defaults."""
    get = os.environ.get
    parser = argparse.ArgumentParser(
        prog="fluxtrain_operator",
        allow_abbrev=False,
        description="Reconcile FluxTrainings while holding the leader election's Lease.",
    )
    parser.add_argument("--image", default=get("FLUXTRAIN_IMAGE", ""), help="default trainer image")
    parser.add_argument(
        "--namespace",
        action="append",
        dest="namespaces",
        metavar="NAMESPACE",
        default=_split(get("FLUXTRAIN_NAMESPACES", "")),
        help="namespace to watch; may be given several times (default: all)",
    )
    parser.add_argument("--lease-namespace", default=get("POD_NAMESPACE", "default"))
    parser.add_argument("--lease-name", default="fluxtrain-operator")
    parser.add_argument("--identity", default=get("POD_NAME", socket.gethostname()))
    parser.add_argument("--address", default="0.0.0.0", help="address of /metrics and the probes")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument(
        "--supplemental-group",
        action="append",
        dest="supplemental_groups",
        metavar="SUPPLEMENTAL_GROUP",
        default=_split(get("FLUXTRAIN_SUPPLEMENTAL_GROUPS", "")),
        help="group id of training pods with GPUs, such as the nodes' render; may be given several times",
    )
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=get("FLUXTRAIN_LOG_FORMAT", "json"),
        help="json: one object a line, with the fields of each decision (default); text: for people",
    )
    values = vars(parser.parse_args(arguments))
    if not values["image"]:
        parser.error("--image or FLUXTRAIN_IMAGE must name the default trainer image")
    if values["log_format"] not in LOG_FORMATS:  # argparse does not check defaults
        parser.error(
            f"FLUXTRAIN_LOG_FORMAT: got {values['log_format']!r}; must be {' or '.join(LOG_FORMATS)}"
        )
    groups = values.pop("supplemental_groups")
    invalid = next((text for text in groups if not _is_group_id(text)), None)
    if invalid is not None:
        parser.error(
            f"--supplemental-group or FLUXTRAIN_SUPPLEMENTAL_GROUPS: {invalid!r} is not a group id "
            f"from 0 to {_MAX_GROUP_ID}"
        )
    namespaces = tuple(values.pop("namespaces"))
    return Options(namespaces=namespaces, supplemental_groups=tuple(map(int, groups)), **values)


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _is_group_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= _MAX_GROUP_ID
