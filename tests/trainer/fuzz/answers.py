"""Answers of web servers, and the chain beside an MLPerf log."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

from tests.trainer.fuzz.target import Target

from fluxtrain.errors import redacted
from fluxtrain.fetch.http import DownloadError, HttpClient, RetryableError
from fluxtrain.mlperf.chain import END, LINE, NONE_BEFORE, START, digest, encode
from fluxtrain.mlperf.chain_verify import verify
from fluxtrain.mlperf.log_lines import TOKEN

_CLIENT = HttpClient(timeout=1.0, attempts=1)
_OFFSET = 2
_LINE = (
    TOKEN + ' {"time_ms": 1, "key": "run_stop", "value": null, "metadata": {"status": "success"}}'
)


def targets() -> dict[str, Target]:
    """Return the targets by name."""
    return {
        "http": Target("a", _download, _responses),
        "chain": Target("mlperf.chain.jsonl", _verify, _chains),
    }


def _responses() -> list[bytes]:
    body = b"abcdef"
    head = b'Content-Length: %d\r\nETag: "a"\r\n\r\n'
    partial = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 2-5/6\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nabcdef\r\n0\r\n\r\n"
    return [
        b"HTTP/1.1 200 OK\r\n" + head % 6 + body,
        partial + head % 4 + body[_OFFSET:],
        b"HTTP/1.1 416 Range Not Satisfiable\r\n" + head % 0,
        chunked,
    ]


def _download(path: Path) -> object:
    """Ask for a file from byte 2 on, of a server that answers with the bytes of ``path``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        thread = threading.Thread(target=_answer, args=(server, path.read_bytes()))
        thread.start()
        try:
            return _received(f"http://127.0.0.1:{server.getsockname()[1]}/a")
        finally:
            thread.join()


def _received(url: str) -> object:
    try:
        with _CLIENT.open(url, _OFFSET) as stream:
            count = sum(map(len, stream.blocks(_CLIENT.timeout, _CLIENT.min_rate)))
            stream.require_total(stream.start + count)
            return count
    except RetryableError as error:  # what the user reads when no attempt is left
        raise DownloadError(f"{redacted(url)}: {error}") from None


def _answer(server: socket.socket, content: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(5.0)
        request = b""
        while b"\r\n\r\n" not in request and (block := connection.recv(4096)):
            request += block
        connection.sendall(content)


def _chains() -> list[bytes]:
    lines, previous = list[bytes](), NONE_BEFORE
    values = {"time_ms": 1, "run": "a", "samples": 0, "dropped": [], "adopted": []}
    for kind, more in ((START, values), (LINE, {"time_ms": 2, "text": _LINE}), (END, {})):
        lines.append(encode(len(lines), previous, kind, more))
        previous = digest(lines[-1])
    return [b"".join(line + b"\n" for line in lines)]


def _verify(path: Path) -> object:
    verdict = verify(_LINE.encode() + b"\n", path.read_bytes(), config=("config.yaml", {"a": 1}))
    return json.dumps(vars(verdict), default=str)
