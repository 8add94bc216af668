"""The rendezvous service runs in the operator's image, which has no torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from cluster.free_ports import free_ports
from tests.paths import ROOT

from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.messages import Heartbeat, Key

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROGRAM = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError(f"{{name}} is not in the operator's image")

sys.meta_path.insert(0, Refuse())
from fluxtrain.cli import main
sys.exit(main({arguments!r}))
"""


def names(requirements: list[str]) -> set[str]:
    texts = (text.replace("==", ">=").partition(">=")[0] for text in requirements)
    return {text.strip().lower().replace("_", "-") for text in texts}


def refused_modules() -> set[str]:
    """Return the modules of the trainer's packages that the operator's image lacks."""
    optional = PROJECT["optional-dependencies"]
    missing = names(optional["trainer"]) - names([*PROJECT["dependencies"], *optional["operator"]])
    installed = packages_distributions()
    return {
        module
        for module, owners in installed.items()
        if missing & {owner.lower().replace("_", "-") for owner in owners}
    }


def test_the_modules_of_torch_are_refused() -> None:
    refused = refused_modules()
    assert {"torch", "numpy", "safetensors"} <= refused
    assert not {"pydantic", "yaml", "fluxtrain"} & refused


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    (tmp_path / "key").write_bytes(b"key")
    port, members = free_ports(2)
    ports = [f"--port={port}", f"--members-port={members}"]
    arguments = ["rendezvous", *ports, "--nodes=1:1", f"--key={tmp_path / 'key'}"]
    code = PROGRAM.format(refused=refused_modules(), arguments=arguments)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    yield process, port
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_an_agent_forms_a_generation_with_it(service: tuple[subprocess.Popen[str], int]) -> None:
    process, port = service
    beat = Heartbeat(sequence=0, attempt=1, agent="a", node="a", joining=True)
    client = Client("127.0.0.1", port, Key(b"key"), beat)
    client.start()
    try:
        for _ in range(100):
            reply = client.next_reply(0.2)
            if (reply is not None and reply.generation) or process.poll() is not None:
                break
    finally:
        client.stop()
    assert process.poll() is None, process.communicate()[1]
    assert reply is not None
    assert (reply.generation, client.reply) != (0, None)
