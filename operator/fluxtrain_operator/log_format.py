"""The format of the operator's log: one JSON object a line, or text."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal, get_args

from fluxtrain.contract.redaction import redacted

LogFormat = Literal["json", "text"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
_TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object; the mapping ``fields`` of a record becomes keys of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON object of ``record``, on one line."""
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
