"""Signatures by openssl: one in base64 beside a file, as cosign's, and DSSE envelopes of statements."""

from __future__ import annotations

import base64
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from supply_chain.checksums import ReleaseError

PAYLOAD_TYPE = "application/vnd.in-toto+json"


def sign(content: bytes, key: Path) -> bytes:
    """Return the signature of ``content`` with SHA-256 by the private ``key``, a PEM file.

    openssl asks at the terminal for the key's passphrase.
    """
    if not key.is_file():
        raise ReleaseError(f"key {key}: there is no such file")
    return _openssl("dgst", "-sha256", "-sign", str(key), content=content, about=f"key {key}")


def is_signed(content: bytes, signature: bytes, public_key: Path) -> bool:
    """Return whether ``signature`` of ``content`` is by the owner of ``public_key``, a PEM file."""
    if not public_key.is_file():
        raise ReleaseError(f"public key {public_key}: there is no such file")
    about = f"public key {public_key}"
    _openssl("pkey", "-pubin", "-noout", "-in", str(public_key), about=about)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "signature"
        path.write_bytes(signature)
        arguments = ["dgst", "-sha256", "-verify", str(public_key), "-signature", str(path)]
        command = ["openssl", *arguments]
        run = subprocess.run(command, input=content, check=False, capture_output=True)
    return run.returncode == 0


def envelope(payload: bytes, key: Path) -> dict[str, Any]:
    """Return the DSSE envelope of a statement, signed by ``key``."""
    signature = sign(_authenticated(payload), key)
    return {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"sig": base64.b64encode(signature).decode()}],
    }


def opened(text: bytes, public_key: Path) -> bytes | None:
    """Return the payload of a DSSE envelope with one signature by ``public_key``; else None."""
    try:
        found = json.loads(text)
        payload = base64.b64decode(found["payload"], validate=True)
        (signature,) = found["signatures"]
        given = base64.b64decode(signature["sig"], validate=True)
        known = found["payloadType"] == PAYLOAD_TYPE
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return payload if known and is_signed(_authenticated(payload), given, public_key) else None


def _authenticated(payload: bytes) -> bytes:
    """Return what is signed of an envelope: DSSE's pre-authentication encoding, version 1."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _openssl(*arguments: str, about: str, content: bytes = b"") -> bytes:
    run = subprocess.run(["openssl", *arguments], input=content, check=False, capture_output=True)
    if run.returncode:
        lines = run.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise ReleaseError(f"{about}: openssl {arguments[0]}: {lines[0][:200]}")
    return run.stdout
