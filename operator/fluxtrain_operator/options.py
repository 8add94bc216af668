"""The operator's options, from command line and environment."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from fluxtrain.errors import ConfigError, redacted
from fluxtrain_operator.base.node_health import NO_ADDITIONS, NodeHealth, parse_node_health
from fluxtrain_operator.base.settings import (
    DEFAULT_POLICY,
    NO_DEFAULTS,
    NO_RULES,
    JobPolicy,
    NetworkRules,
    PodDefaults,
    parse_job_policy,
    parse_network_rules,
    parse_pod_defaults,
)
from fluxtrain_operator.planner.guard import DISRUPTION_PERCENT

# The format of the operator's log: one JSON object a line, or text.


LogFormat = Literal["json", "text"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
_TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object; the mapping ``fields`` of a record becomes keys of its own."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        values = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return redacted(json.dumps(values, default=str))


class TextFormatter(logging.Formatter):
    """Formats a record as text, for people."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the base class's name
        """Return the message of ``record`` on one line: what a job is called must not look like a record."""
        record.message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.message)
        return redacted(super().formatMessage(record))


def configure_logging(log_format: LogFormat) -> None:
    """Write records from level INFO on to stderr in ``log_format``; of kopf, warnings only."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("kopf").setLevel(logging.WARNING)


_MAX_PERCENT = 100
_SWITCH = ("true", "false")
_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "network": ("network_rules", parse_network_rules),
    "pod_defaults": ("pod_defaults", parse_pod_defaults),
    "job_policy": ("job_policy", parse_job_policy),
    "node_health": ("node_health", parse_node_health),
}
"""Options in JSON: the field of `Options`, and what reads the text."""


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
    log_format: LogFormat = "json"
    rendezvous_image: str = ""
    """Image of the rendezvous pods; empty: that of the job."""
    pod_defaults: PodDefaults = NO_DEFAULTS
    job_policy: JobPolicy = DEFAULT_POLICY
    network_rules: NetworkRules = NO_RULES
    disruption_percent: int = DISRUPTION_PERCENT
    watch_nodes: bool = True
    """Whether nodes are watched, which needs a right on the whole cluster."""
    node_health: NodeHealth = NO_ADDITIONS
    """Marks of unhealthy nodes in addition to the known ones."""


def _variable(option: str) -> str:
    """Return the environment variable that gives the default of ``option``."""
    return f"FLUXTRAIN_{option.strip('-').replace('-', '_').upper()}"


def parse(arguments: list[str] | None) -> Options:
    """Return the options in ``arguments``, or of the process; environment variables give the defaults."""
    parser = argparse.ArgumentParser(
        prog="fluxtrain_operator",
        allow_abbrev=False,
        description="Reconcile FluxTrainings while holding the leader election's Lease.",
    )

    def add(flag: str, fallback: str = "", **facts: Any) -> None:
        parser.add_argument(flag, default=os.environ.get(_variable(flag), fallback), **facts)

    add("--image", help="default trainer image")
    parser.add_argument(
        "--namespace",
        action="append",
        dest="namespaces",
        metavar="NAMESPACE",
        default=[part for part in os.environ.get("FLUXTRAIN_NAMESPACES", "").split(",") if part],
        help="namespace to watch; may be given several times (default: all)",
    )
    parser.add_argument("--lease-namespace", default=os.environ.get("POD_NAMESPACE", "default"))
    parser.add_argument("--lease-name", default="fluxtrain-operator")
    parser.add_argument("--identity", default=os.environ.get("POD_NAME", socket.gethostname()))
    parser.add_argument(
        "--address", default="", help="address of /metrics and the probes (default: all)"
    )
    parser.add_argument("--port", type=int, default=8080)
    add(
        "--rendezvous-image",
        help="image of the rendezvous pods, which need no torch (default: that of the job)",
    )
    add(
        "--pod-defaults",
        metavar="JSON",
        help="what all jobs' pods get if the jobs do not set it; the chart's value podDefaults",
    )
    add(
        "--job-policy",
        metavar="JSON",
        help="what jobs may ask for; the chart's value jobs (default: that of the chart)",
    )
    add(
        "--network",
        metavar="JSON",
        help="what the network policies of jobs admit; the chart's value network, and the operator's pods",
    )
    add(
        "--watch-nodes",
        "true",
        choices=_SWITCH,
        help="false: run without the right to read nodes; lost ones are noticed by the silence of agents",
    )
    add(
        "--node-health",
        metavar="JSON",
        help="conditions, taints and labels that mark nodes as unhealthy, in addition to the known ones; "
        "the chart's value nodeHealth",
    )
    add(
        "--log-format",
        "json",
        choices=LOG_FORMATS,
        help="json: one object a line, with the fields of each decision (default); text: for people",
    )
    add(
        "--disruption-percent",
        str(DISRUPTION_PERCENT),
        metavar="PERCENT",
        help="part of all pods that may be replaced per minute for faults of nodes, from 1 to 100 "
        f"(default: {DISRUPTION_PERCENT})",
    )
    values = vars(parser.parse_args(arguments))
    if not values["image"]:
        parser.error("--image or FLUXTRAIN_IMAGE must name the default trainer image")
    for option, choices in (("log_format", LOG_FORMATS), ("watch_nodes", _SWITCH)):
        if (got := values[option]) not in choices:  # argparse does not check defaults
            parser.error(f"{_variable(option)}: got {got!r}; must be {' or '.join(choices)}")
    watch_nodes = values.pop("watch_nodes")
    percent = values.pop("disruption_percent")
    if not (percent.isascii() and percent.isdecimal() and 1 <= int(percent) <= _MAX_PERCENT):
        parser.error(
            f"--disruption-percent or FLUXTRAIN_DISRUPTION_PERCENT: {percent!r} is not a whole number "
            f"from 1 to {_MAX_PERCENT}"
        )
    for option, (name, parse_text) in _SETTINGS.items():
        try:
            values[name] = parse_text(values.pop(option))
        except ConfigError as error:
            flag = f"--{option.replace('_', '-')} or {_variable(option)}"
            parser.error(f"{flag}: {error}")
    values["namespaces"] = tuple(values["namespaces"])
    return Options(watch_nodes=watch_nodes == "true", disruption_percent=int(percent), **values)
