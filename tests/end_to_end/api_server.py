"""The API server over one kept-alive connection: a hundred questions take the time of one kubectl."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cluster.kubectl import Manifest

STRICT = "fieldManager=tests&fieldValidation=Strict"
"""What ``kubectl --validate=strict`` asks: unknown fields and keys that stand twice are refused."""
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Answer:
    """What the API server said to one request."""

    code: int
    body: Manifest

    @property
    def message(self) -> str:
        """Return the whole message of a refusal."""
        return str(self.body.get("message", ""))

    @property
    def fields(self) -> list[str]:
        """Return the paths that a refusal names, one for each thing that is wrong."""
        causes = self.body.get("details", {}).get("causes", [])
        return [str(cause.get("field")) for cause in causes]

    @property
    def accepted(self) -> bool:
        """Return whether it did, or would have done, what was asked."""
        return self.code in (200, 201)


class ApiServer:
    """Asks with the rights of a kubeconfig whose certificates are in it."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        """Keep the client's certificate in ``folder``: Python takes it from a file only."""
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        trusted = _decoded(cluster["certificate-authority-data"])
        tls = ssl.create_default_context(cadata=trusted)
        pair = folder / "client.pem"
        pair.touch(mode=0o600)
        keys = ("client-certificate-data", "client-key-data")
        pair.write_text("".join(_decoded(user[key]) for key in keys))
        tls.load_cert_chain(pair)
        server = urlsplit(cluster["server"])
        self._connection = http.client.HTTPSConnection(
            server.hostname or "", server.port, context=tls, timeout=60
        )

    def create(self, path: str, manifest: Manifest, *, dry_run: bool = True) -> Answer:
        """Create ``manifest`` in the collection at ``path``."""
        return self._ask("POST", f"{path}?{STRICT}{_only(dry_run)}", manifest)

    def replace(self, path: str, manifest: Manifest, *, dry_run: bool = True) -> Answer:
        """Put ``manifest`` in the place of the object at ``path``."""
        return self._ask("PUT", f"{path}?{STRICT}{_only(dry_run)}", manifest)

    def apply(self, path: str, manifest: Manifest, *, dry_run: bool = True) -> Answer:
        """Apply ``manifest`` to the object at ``path``, as the operator does."""
        return self._ask("PATCH", f"{path}?{STRICT}&force=true{_only(dry_run)}", manifest, _APPLY)

    def delete(self, path: str) -> Answer:
        """Delete the object at ``path``."""
        return self._ask("DELETE", path, {})

    def get(self, path: str) -> Answer:
        """Return the object at ``path``."""
        return self._ask("GET", path, None)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, verb: str, path: str, body: Manifest | None, kind: str = _JSON) -> Answer:
        text = None if body is None else json.dumps(body)
        self._connection.request(verb, path, text, {"Content-Type": kind, "Accept": _JSON})
        answer = self._connection.getresponse()
        return Answer(answer.status, json.loads(answer.read()))


def _only(dry_run: bool) -> str:
    return "&dryRun=All" if dry_run else ""


def _decoded(data: str) -> str:
    return base64.b64decode(data).decode()
