"""A local server in place of S3, the Hub and the web."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.trainer.fetch.servers import FileServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Return a server that the clients of S3 and of the Hub ask."""
    with FileServer({}) as server:
        point_at(server, monkeypatch)
        yield server


def point_at(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all clients of this process ask ``server``."""
    from huggingface_hub import constants, hf_api, hf_file_system

    for module in (constants, hf_api.constants, hf_file_system.constants):
        monkeypatch.setattr(module, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hf_api.api, "endpoint", server.url)
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)


def environment(server: FileServer) -> dict[str, str]:
    """Return the variables that let clients ask ``server``."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN": "hf_secret",
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "aws_secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
