"""The operator's options come from command line and environment, and are validated; its log's format.

Each record is one JSON object on one line, or text.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from typing import Any

import pytest
from tests.paths import ROOT

from fluxtrain_operator.base.settings import NO_DEFAULTS, parse_network_rules
from fluxtrain_operator.options import JsonFormatter, LogFormat, configure_logging, parse

IMAGE = "--image=example.org/trainer:1"
DEFAULTS = "FLUXTRAIN_POD_DEFAULTS"
PERCENT = "FLUXTRAIN_DISRUPTION_PERCENT"
LOG_FORMAT = "FLUXTRAIN_LOG_FORMAT"


def test_without_settings_pods_get_nothing_and_the_rendezvous_has_the_image_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(DEFAULTS, raising=False)
    monkeypatch.delenv("FLUXTRAIN_RENDEZVOUS_IMAGE", raising=False)
    options = parse([IMAGE])
    assert (options.pod_defaults, options.rendezvous_image) == (NO_DEFAULTS, "")


@pytest.mark.parametrize("groups", [[], [44], [44, 109, 2**31 - 1]])
def test_pod_defaults_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, groups: list[int]
) -> None:
    monkeypatch.setenv(DEFAULTS, json.dumps({"supplementalGroups": groups}))
    assert parse([IMAGE]).pod_defaults.supplemental_groups == groups


def test_options_of_the_command_line_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEFAULTS, "not JSON")
    monkeypatch.setenv("FLUXTRAIN_RENDEZVOUS_IMAGE", "operator:1")
    arguments = [IMAGE, '--pod-defaults={"nodeSelector": {"pool": "a"}}', "--rendezvous-image=b:2"]
    options = parse(arguments)
    assert options.pod_defaults.node_selector == {"pool": "a"}
    assert options.rendezvous_image == "b:2"


@pytest.mark.parametrize(
    ("variable", "option", "log_format"),
    [(None, [], "json"), ("text", [], "text"), ("text", ["--log-format=json"], "json")],
)
def test_the_log_format_comes_from_command_line_or_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, option: list[str], log_format: str
) -> None:
    monkeypatch.delenv(LOG_FORMAT, raising=False)
    if variable is not None:
        monkeypatch.setenv(LOG_FORMAT, variable)
    assert parse([IMAGE, *option]).log_format == log_format


def test_without_rules_of_the_network_the_operator_may_be_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLUXTRAIN_NETWORK", raising=False)
    rules = parse([IMAGE]).network_rules
    assert (rules.operator, rules.metrics_from, rules.egress) == (None, [], "any")


@pytest.mark.parametrize(("text", "percent"), [("", 10), ("1", 1), ("100", 100)])
def test_the_disruption_percentage_has_a_default(
    monkeypatch: pytest.MonkeyPatch, text: str, percent: int
) -> None:
    monkeypatch.delenv(PERCENT, raising=False)
    assert parse([IMAGE, *([f"--disruption-percent={text}"] if text else [])]) == replace(
        parse([IMAGE]), disruption_percent=percent
    )
    monkeypatch.setenv(PERCENT, text or "10")
    assert parse([IMAGE]).disruption_percent == percent


def test_nodes_are_watched_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse([IMAGE]).watch_nodes
    monkeypatch.setenv("FLUXTRAIN_WATCH_NODES", "false")
    assert not parse([IMAGE]).watch_nodes


NETWORK = "FLUXTRAIN_NETWORK"
RANGES = ("0.0.0.0/0", "255.255.255.255/32", "10.20.0.0/16", "::/0", "::1/128", "fd00::/8")


@pytest.mark.parametrize("cidr", RANGES)
def test_the_largest_and_the_smallest_ranges_are_valid_here_and_in_the_chart(cidr: str) -> None:
    rules = parse_network_rules(json.dumps({"egressTo": [{"ipBlock": {"cidr": cidr}}]}))
    (peer,) = rules.egress_to
    assert peer.ip_block is not None
    assert peer.ip_block.cidr == cidr
    schema = json.loads((ROOT / "charts/fluxtrain-operator/values.schema.json").read_text())
    assert re.search(schema["definitions"]["cidr"]["pattern"], cidr)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (DEFAULTS, "{", "podDefaults: got '{'; must be JSON"),
        (DEFAULTS, [], "podDefaults: got []; must be a mapping"),
        (DEFAULTS, {"labels": {}}, "podDefaults.labels: no such field"),
        (
            DEFAULTS,
            {"supplementalGroups": ["render"]},
            "podDefaults.supplementalGroups[0]: got 'render'",
        ),
        (DEFAULTS, {"supplementalGroups": [-1]}, "podDefaults.supplementalGroups[0]: got -1"),
        (DEFAULTS, {"supplementalGroups": [2**31]}, "from 0 to 2147483647"),
        (DEFAULTS, {"imagePullSecrets": [{"name": "a"}]}, "podDefaults.imagePullSecrets[0]"),
        (
            DEFAULTS,
            {"tolerations": [{"key": "a", "effect": "Never"}]},
            "podDefaults.tolerations[0].effect",
        ),
        (DEFAULTS, {"tolerations": [{"value": "a"}]}, "podDefaults.tolerations[0].operator"),
        (
            DEFAULTS,
            {"rendezvous": {"resources": {"limits": {"cpu": "one"}}}},
            "podDefaults.rendezvous.resources.limits.cpu",
        ),
        (DEFAULTS, {"nodeSelector": {"a": "b c"}}, "podDefaults.nodeSelector.a"),
        (DEFAULTS, {"env": [{"name": "PET_NNODES", "value": "1"}]}, "podDefaults.env[0].name"),
        (DEFAULTS, {"env": [{"name": "A", "value": "1"}] * 2}, "podDefaults.env: got"),
        (NETWORK, "{", "network: got '{'; must be JSON"),
        (NETWORK, {"egress": "none"}, "network.egress: got 'none'"),
        (NETWORK, {"operator": []}, "network.operator: got []"),
        (
            NETWORK,
            {"metricsFrom": [{}]},
            "network.metricsFrom[0].ipBlock: got null; must be given alone",
        ),
        (
            NETWORK,
            {"metricsFrom": [{"ipBlock": {"cidr": "10.0.0.1/8"}}]},
            "the first address of a range",
        ),
        (
            NETWORK,
            {"dns": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}}]},
            "inside cidr",
        ),
        (
            NETWORK,
            {"dns": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["fd00::/16"]}}]},
            "inside cidr",
        ),
        (
            NETWORK,
            {"dns": [{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}]},
            "must be given alone",
        ),
        (
            NETWORK,
            {"egressTo": [{"podSelector": {}, "ports": [0]}]},
            "network.egressTo[0].ports[0]: got 0",
        ),
        *(
            (PERCENT, text, "is not a whole number from 1 to 100")
            for text in ("0", "101", "-1", "1.5", "ten", "")
        ),
        (LOG_FORMAT, "xml", "got 'xml'; must be json or text"),
        ("FLUXTRAIN_WATCH_NODES", "no", "got 'no'; must be true or false"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_path(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: Any,
    message: str,
) -> None:
    monkeypatch.setenv(variable, value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(SystemExit) as error:
        parse([IMAGE])
    assert error.value.code == 2
    written = capsys.readouterr().err
    assert f"{variable}: " in written
    assert message in written


@contextmanager
def no_handlers() -> Iterator[logging.Logger]:
    """Return the root logger without handlers; afterwards it has its own again."""
    logger, kopf = logging.getLogger(), logging.getLogger("kopf")
    before, levels = logger.handlers[:], (logger.level, kopf.level)
    logger.handlers.clear()
    try:
        yield logger
    finally:
        logger.handlers[:] = before
        logger.setLevel(levels[0])
        kopf.setLevel(levels[1])


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord(
        "fluxtrain_operator", logging.INFO, "f.py", 1, message, arguments, None
    )
    vars(made).update(extra)
    return made


def test_a_record_is_one_object_on_one_line() -> None:
    line = JsonFormatter().format(record("a %s\nline", 'quoted "text"'))
    assert "\n" not in line
    values = json.loads(line)
    assert values["message"] == 'a quoted "text"\nline'
    assert (values["level"], values["logger"]) == ("info", "fluxtrain_operator")
    assert values["time"].endswith("Z")


def test_fields_are_keys_of_the_object() -> None:
    values = json.loads(JsonFormatter().format(record("done", fields={"job": "a", "attempt": 2})))
    assert (values["job"], values["attempt"]) == ("a", 2)


def test_a_traceback_is_part_of_the_object() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        failed = record("failed", exc_info=sys.exc_info())
    line = JsonFormatter().format(failed)
    assert "\n" not in line
    assert "ValueError: wrong" in json.loads(line)["exception"]


def test_the_format_can_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with no_handlers() as root:
        configure_logging("text")
        root.info("leading as a")
    assert stream.getvalue().endswith("INFO leading as a\n")


def test_json_is_written_to_stderr_without_kopfs_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with no_handlers() as root:
        configure_logging("json")
        root.info("leading as a")
        logging.getLogger("kopf").info("not shown")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["message"] == "leading as a"


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_no_credentials_are_logged(log_format: LogFormat) -> None:
    stream = io.StringIO()
    with no_handlers() as logger, redirect_stderr(stream):
        configure_logging(log_format)
        logger.info(
            "failed: %s",
            "https://me:secret@example.com/?sig=secret",
            extra={"fields": {"detail": "hf_" + "a1" * 17}},
        )
    assert "failed: https://***@example.com/?***" in stream.getvalue()
    assert "secret" not in stream.getvalue()
    assert "a1a1" not in stream.getvalue()


def test_a_text_with_line_ends_is_one_line() -> None:
    stream = io.StringIO()
    with no_handlers() as logger, redirect_stderr(stream):
        configure_logging("text")
        logger.warning("job %s", "a\n2026-01-01 00:00:00 INFO forged\x1b[2J\r")
    assert stream.getvalue().count("\n") == 1
    assert "a\\n2026-01-01 00:00:00 INFO forged\\x1b[2J\\r" in stream.getvalue()
