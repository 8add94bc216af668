"""``fluxtrain fetch``: models from a bucket or a web server, pictures at a URL, and a licence's token."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tests.trainer.commands import start
from tests.trainer.fetch.servers import FileServer
from tests.trainer.tiny_encoders import png, small_image, write_encoders

from fluxtrain.cli import main, prepare
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE
from fluxtrain.prepare import encoders
from fluxtrain.prepare.download import LicenceError

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return files of tiny encoders as FLUX.1 has them; T5's weights are in two files, with an index."""
    root, files = write_encoders(tmp_path_factory.mktemp("encoders")), dict[str, bytes]()
    for name, weights, tokenizer in (
        ("t5", "text_encoder_2", "tokenizer_2"), ("clip", "text_encoder", "tokenizer")
    ):  # fmt: skip
        for path in (root / name).iterdir():
            folder = tokenizer if "token" in path.name else weights
            files[f"{folder}/{path.name}"] = path.read_bytes()
    whole = files.pop("text_encoder_2/model.safetensors")
    part = "model-00001-of-00001.safetensors"
    files[f"text_encoder_2/{part}"] = whole
    index = {"metadata": {}, "weight_map": {"shared.weight": part}}
    files["text_encoder_2/model.safetensors.index.json"] = json.dumps(index).encode()
    files["ae.safetensors"] = (root / "autoencoder/ae.safetensors").read_bytes()
    files["flux1-dev.safetensors"] = save({"weights": torch.zeros(750_000)})
    return files


def job(folder: Path, **data: Any) -> Path:
    path = folder / "style.yaml"
    run = {"preset": "dev-lora", "data": {"images": "pictures", **data}}
    document = {
        "apiVersion": "fluxtrain.dev/v1alpha1", "kind": "FluxTraining",
        "metadata": {"name": "style"}, "spec": {"run": run},
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return path


PLACES = {"s3": "s3://bucket/flux", "http": "{url}/bucket/flux/"}


@pytest.mark.parametrize("kind", PLACES)
def test_models_come_from_a_store_and_continue(
    kind: str, server: FileServer, published: dict[str, bytes], tmp_path: Path, capsys: Capture
) -> None:
    server.files |= {f"bucket/flux/{name}": content for name, content in published.items()}
    base = "bucket/flux/flux1-dev.safetensors"
    server.cuts = {base: [1_500_000]}
    models, place = tmp_path / "models", PLACES[kind].format(url=server.url)
    fetch = ["fetch", str(job(tmp_path)), "--models", str(models), "--from", place]
    assert main(fetch) == EXIT_OK, capsys.readouterr().err
    assert (models / "flux1-dev.safetensors").read_bytes() == published["flux1-dev.safetensors"]
    names = {path.relative_to(models).as_posix() for path in models.rglob("*") if path.is_file()}
    assert {"t5/config.json", "clip/tokenizer.json", "autoencoder/ae.safetensors"} < names
    assert not [path for path in models.iterdir() if path.name.startswith(".")]
    del server.files[base]
    (models / "flux1-dev.safetensors").unlink()
    assert main(fetch) == EXIT_USAGE
    says = f"not in {models}: flux1-dev.safetensors; {place.rstrip('/')} has no such files"
    assert says in capsys.readouterr().err


LOGIN = b"<!doctype html><title>Log in</title>"
DAMAGED = [
    ("flux1-dev.safetensors", LOGIN, "it is a web page"),
    ("flux1-dev.safetensors", b"", "it has 0 bytes"),
    (
        "flux1-dev.safetensors",
        save({"weights": torch.zeros(9)})[:-1],
        "not a whole safetensors file",
    ),
    ("text_encoder_2/model.safetensors.index.json", LOGIN, "not the JSON of a model"),
    ("text_encoder/config.json", LOGIN, "not the JSON of a model"),
]


@pytest.mark.parametrize(("name", "content", "says"), DAMAGED)
def test_what_is_no_model_is_never_put_in_its_place(
    name: str,
    content: bytes,
    says: str,
    server: FileServer,
    published: dict[str, bytes],
    tmp_path: Path,
    capsys: Capture,
) -> None:
    server.files |= published
    whole, server.files[name] = server.files[name], content
    models = tmp_path / "models"
    fetch = ["fetch", str(job(tmp_path)), "--models", str(models), "--from", f"{server.url}/"]
    assert main(fetch) == EXIT_USAGE
    error = capsys.readouterr().err
    assert f"{server.url}/{name}: " in error
    assert says in error
    server.files[name] = whole
    assert main(fetch) == EXIT_OK
    base = models / "flux1-dev.safetensors"
    base.write_bytes(content)
    assert main(fetch) == EXIT_USAGE
    assert "remove it, and the same command fetches it" in capsys.readouterr().err


def test_of_pods_with_one_volume_one_fetches_and_the_others_wait(
    published: dict[str, bytes], tmp_path: Path
) -> None:
    run = {"preset": "dev-lora", "data": {"images": "pictures"}}
    (tmp_path / "config.json").write_text(resolve(run).model_dump_json())
    models, server = tmp_path / "models", FileServer(published)
    variables = {"FLUXTRAIN_CONFIG": str(tmp_path / "config.json"), "FLUXTRAIN_MODELS": str(models)}
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    pods = [start("fetch-models", f"{server.url}/", log=log, **variables) for log in logs]
    assert [pod.wait(120) for pod in pods] == [EXIT_OK, EXIT_OK], [log.read_text() for log in logs]
    server.shutdown()
    server.server_close()
    assert all(f"{models} has all that the run names" in log.read_text() for log in logs)
    assert server.requests["flux1-dev.safetensors"] == 2, (
        "its size is asked for, then it is fetched"
    )
    again = start("fetch-models", "http://127.0.0.1:1/", log=logs[0], **variables)
    assert again.wait(60) == EXIT_OK, "nothing is missing"


def test_pictures_at_a_url_are_fetched_where_a_run_finds_them(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(prepare, "fetch_missing", lambda *arguments: None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server.files["bucket/p/a.png"] = png(small_image(1))
    file = job(tmp_path, images="s3://bucket/p", download={"folder": str(tmp_path / "node")})
    assert main(["fetch", str(file), "--data", str(tmp_path)]) == EXIT_OK
    (found,) = (tmp_path / "node").rglob("a.png")
    assert f"s3://bucket/p: in {found.parent}" in capsys.readouterr().err
    requests = server.sent["bucket/p/a.png"]
    assert main(["fetch", str(file), "--data", str(tmp_path)]) == EXIT_OK
    assert server.sent["bucket/p/a.png"] == requests


def test_a_token_is_asked_for_once_and_only_at_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    asked, tokens = list[str](), list[str | None]()

    def fetch(*arguments: object) -> list[str]:
        tokens.append(prepare.os.environ.get("HF_TOKEN"))
        if tokens[-1] is None:
            raise LicenceError("org/name: accept its licence")
        return []

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(encoders, "fetch_models", fetch)
    monkeypatch.setattr(prepare, "getpass", lambda text: asked.append(text) or "hf_secret")
    command = ["fetch", str(job(tmp_path)), "--models", str(tmp_path)]
    assert main(command) == EXIT_USAGE
    assert (asked, tokens) == ([], [None])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)

    def ended(text: str) -> str:
        raise EOFError

    with monkeypatch.context() as context:
        context.setattr(prepare, "getpass", ended)
        assert main(command) == EXIT_USAGE
    tokens.pop()
    assert main(command) == EXIT_OK
    assert len(asked) == 1
    assert tokens == [None, None, "hf_secret"]
    assert "hf_secret" not in "".join(capsys.readouterr())
    monkeypatch.delenv("HF_TOKEN")
