"""The operator's log: each record is one JSON object on one line, or text."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from fluxtrain_operator.options import JsonFormatter, LogFormat, configure_logging


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
