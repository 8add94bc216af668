"""Kubeconfig files with embedded certificates."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from cluster.access.certificates import AUTHORITY, Identity
from cluster.layout import API_URL

CLUSTER = "fluxtrain"


def write(path: Path, identity: Identity) -> Path:
    """Write a self-contained kubeconfig of ``identity``."""
    user = {
        "client-certificate-data": _encoded(identity.certificate),
        "client-key-data": _encoded(identity.key),
    }
    server = {"server": API_URL, "certificate-authority-data": _encoded(AUTHORITY.certificate)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": CLUSTER, "cluster": server}],
        "users": [{"name": identity.name, "user": user}],
        "contexts": [{"name": CLUSTER, "context": {"cluster": CLUSTER, "user": identity.name}}],
        "current-context": CLUSTER,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=2))
    return path


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
