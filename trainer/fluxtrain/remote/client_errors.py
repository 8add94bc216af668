"""Errors of the libraries that speak with stores, as those of one attempt; and files that they open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fluxtrain.redaction import redacted
from fluxtrain.remote.http import ByteStream, RetryableError
from fluxtrain.remote.store import ChangedError, RefusedError

READ_BYTES = 8 << 20
"""Bytes of one request."""
_AWS = re.compile(r"\bAWS Error (\w+)(?: \(HTTP status (\d{3})\))?")
_DENIED = (
    *("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH"),
    *("UNRECOGNIZED_CLIENT", "INVALID_CLIENT_TOKEN_ID"),
)
_UNKNOWN = ("NO_SUCH_KEY", "NO_SUCH_BUCKET", "RESOURCE_NOT_FOUND")
_HTTP = re.compile(r"(\d{3}) .*")


@contextmanager
def client_errors() -> Iterator[None]:
    """Raise errors of a library as RefusedError if another attempt would not help, else RetryableError."""
    try:
        yield
    except (RefusedError, ChangedError, RetryableError):
        raise
    except Exception as error:  # of whatever HTTP library the client uses
        refused = refusal(error)
        if refused is not None:
            raise RefusedError(refused) from None
        raise RetryableError(_reason(error)) from None


@contextmanager
def stream_of(opened: Any, offset: int, size: int) -> Iterator[ByteStream]:
    """Yield the bytes of the file ``opened``, of ``size`` bytes, from ``offset`` on; then close it."""
    try:
        with client_errors():
            opened.seek(offset)
        yield ByteStream(_Blocks(opened), offset, size)
    finally:
        with suppress(Exception):
            opened.close()


def refusal(error: BaseException) -> str | None:
    """Return why another attempt would not help after ``error``, or None if it may."""
    status, aws = _status(error), _AWS.search(str(error))
    if status in (401, 403) or (aws and aws[1] in _DENIED):
        return "access is denied, or it does not exist; credentials come from the environment"
    if status == 404 or isinstance(error, FileNotFoundError) or (aws and aws[1] in _UNKNOWN):
        return "there is nothing of this name"
    return None


@dataclass(frozen=True)
class _Blocks:
    opened: Any

    def read1(self, size: int, /) -> bytes:
        with client_errors():
            content: bytes = self.opened.read(max(size, READ_BYTES))
            return content


def _reason(error: BaseException) -> str:
    text = redacted(" ".join(str(error).split()))[:300]
    return text if text and text.isprintable() else type(error).__name__


def _status(error: BaseException) -> int | None:
    """Return the status of the response in ``error``, or with which its text begins, or which AWS tells."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(code, int):
        return code
    found, aws = _HTTP.fullmatch(str(error)), _AWS.search(str(error))
    digits = found[1] if found else (aws[2] if aws else None)
    return int(digits) if digits else None
