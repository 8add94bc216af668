"""Local servers that speak as S3 and as the Hub do, with files that tests may change while they are read."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c" * 40
_MODIFIED = 1_700_000_000


class FileServer(ThreadingHTTPServer):
    """Serves ``files``, by path: as a web server with ETags, as S3 with buckets, and as the Hub."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(files)
        self.versions = Counter[str]()
        self.sent, self.requests = Counter[str](), Counter[str]()
        self.denied: set[str] = set()
        self.failures = Counter[str]()
        """Number of answers of a path that are 500."""
        self.cuts: dict[str, list[int]] = {}
        """Bytes after which answers of a path end, in turn."""
        self.before: Callable[[str], None] = lambda path: None
        self.authorizations: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def change(self, path: str, content: bytes) -> None:
        """Replace a file by another version."""
        self.files[path] = content
        self.versions[path] += 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing when a client disconnects."""


class Handler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path).strip("/"), parse_qs(parts.query)
        self.server.requests[path] += 1
        self.server.authorizations.add(self.headers.get("Authorization", ""))
        self.server.before(path)
        if any(path.startswith(denied) for denied in self.server.denied):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif path.startswith("api/datasets/"):
            self._hub(path.removeprefix("api/datasets/"))
        elif "list-type" in query:
            self._listing(path, {name: values[0] for name, values in query.items()})
        else:
            self._file(_without_revision(path))

    do_HEAD = do_GET  # noqa: N815  (the library's name)

    def do_POST(self) -> None:
        """Answer the Hub's question for some paths."""
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length).decode()
        wanted = parse_qs(body)["paths"] if "paths=" in body else json.loads(body)["paths"]
        repository = "/".join(urlsplit(self.path).path.split("/")[3:5])
        entries = [entry for entry in self._tree(repository) if entry["path"] in wanted]
        self._json(entries)

    def _hub(self, path: str) -> None:
        repository, what = "/".join(path.split("/")[:2]), path.split("/")[2:3]
        tree = self._tree(repository)
        if not tree:
            self._answer(404, b"", X_Error_Code="RepoNotFound")
        elif what == ["tree"]:
            below = "/".join(path.split("/")[4:])
            found = [e for e in tree if not below or e["path"].startswith(f"{below}/")]
            if found:
                self._json(found)
            else:
                self._answer(404, b"", X_Error_Code="EntryNotFound")
        else:
            asked = path.split("/")[3:4] if what == ["revision"] else []
            self._json({"id": repository, "sha": (asked or [COMMIT])[0], "siblings": []})

    def _tree(self, repository: str) -> list[dict[str, Any]]:
        prefix = f"datasets/{repository}/"
        entries = []
        for name, content in sorted(self.server.files.items()):
            if name.startswith(prefix):
                blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                entry = {"type": "file", "path": name.removeprefix(prefix), "oid": blob}
                entry["size"] = len(content)
                if name.endswith((".tar", ".parquet")):
                    digest = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
                entries.append(entry)
        return entries

    def _listing(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys = [n.removeprefix(f"{bucket}/") for n in sorted(self.server.files)]
        keys = [k for k in keys if f"{bucket}/{k}" in self.server.files and k.startswith(prefix)]
        folders = set[str]()
        if delimiter:
            cut = {k: k[len(prefix) :].partition(delimiter) for k in keys}
            folders = {prefix + head + delimiter for head, found, _ in cut.values() if found}
            keys = [key for key, (_, found, _) in cut.items() if not found]
        size = self.server.files
        body = "<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
        body += "<IsTruncated>false</IsTruncated>" + "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:"
            f"{self.server.versions[f'{bucket}/{key}']:02d}.000Z</LastModified>"
            f"<Size>{len(size[f'{bucket}/{key}'])}</Size></Contents>"
            for key in keys
        )
        body += "".join(f"<CommonPrefixes><Prefix>{f}</Prefix></CommonPrefixes>" for f in folders)
        self._answer(200, f"{body}</ListBucketResult>".encode(), Content_Type="application/xml")

    def _file(self, path: str) -> None:
        content = self.server.files.get(path)
        if content is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if self.server.failures[path]:
            self.server.failures[path] -= 1
            self._answer(500, b"")
            return
        version = self.server.versions[path]
        modified = {"version": 1767225600 + version}  # 2026-01-01, as the listing says
        headers = {
            "ETag": f'"{version}"',
            "Last-Modified": formatdate(modified["version"], usegmt=True),
            "Accept-Ranges": "bytes",
        }
        start, end, code = 0, len(content), 200
        asked = self.headers.get("Range")
        if asked and self.headers.get("If-Range", f'"{version}"') == f'"{version}"':
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end, code = int(first), min(int(last or end) + 1, end), 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        if start > len(content) or (start == len(content) and content):
            self._answer(416, b"")
            return
        self._answer(code, content[start:end], path, **headers)

    def _json(self, content: object) -> None:
        self._answer(200, json.dumps(content).encode(), Content_Type="application/json")

    def _answer(self, code: int, body: bytes, path: str = "", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        if self.command == "HEAD":
            self.end_headers()
            return
        cuts = self.server.cuts.get(path, [])
        if cuts and code in (200, 206) and path:
            body = body[: cuts.pop(0)]
            self.close_connection = True
        if path:  # counted before the client can go on
            self.server.sent[path] += len(body)
        self.end_headers()
        self.wfile.write(body)


def _without_revision(path: str) -> str:
    """Return the path of a file that the Hub has below ``resolve/REVISION``."""
    parts = path.split("/")
    return "/".join(parts[:3] + parts[5:]) if parts[3:4] == ["resolve"] else path
