"""Encoders are collected from folders, manifests and the Hub; what is not whole never appears."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from tests.contract.bad_specs import GOOD, changed
from tests.trainer.prepare.faulty_server import Handler, Server, like_the_hub, serving
from tests.trainer.tiny_encoders import config, write_encoders

from fluxtrain.cli import main
from fluxtrain.encode.encoders import load_encoders
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_STORAGE, EXIT_USAGE

pytestmark = pytest.mark.slow

COMMIT, NAME, TOKEN = "c" * 40, "example-org/flux", "hf_secret"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return tiny encoders in the layout of FLUX.1, with files that nobody needs."""
    root, source = tmp_path_factory.mktemp("published"), tmp_path_factory.mktemp("source")
    write_encoders(source)
    for name, weights, tokenizer in (
        ("t5", "text_encoder_2", "tokenizer_2"),
        ("clip", "text_encoder", "tokenizer"),
    ):
        (root / tokenizer).mkdir()
        shutil.copytree(source / name, root / weights)
        for path in (root / weights).glob("*token*"):
            shutil.move(path, root / tokenizer / path.name)
    shutil.copyfile(source / "autoencoder/ae.safetensors", root / "ae.safetensors")
    (root / "text_encoder_2/flax_model.msgpack").write_bytes(b"unused")
    (root / "flux1-dev.safetensors").write_bytes(save({"weights": torch.ones(3)}))
    return root


@pytest.fixture
def copy(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "published"))


def prepare(models: Path, *options: str) -> int:
    return main(["prepare", "encoders", "--output", str(models), *options])


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_encoders_of_a_folder_load_as_the_presets_name_them(
    published: Path, tmp_path: Path, capsys: Capture
) -> None:
    models = tmp_path / "models"
    assert prepare(models, "--from", str(published)) == EXIT_OK
    output = capsys.readouterr().err
    assert f"{models}/t5: 16 wide, " in output
    assert output.count("checksums recorded") == 3
    assert sorted(path.name for path in models.iterdir()) == [
        "autoencoder", "clip", "encoders.json", "t5",
    ]  # fmt: skip
    assert not (models / "t5/flax_model.msgpack").exists()
    recorded = json.loads((models / "encoders.json").read_text())
    weights = (models / "autoencoder/ae.safetensors").read_bytes()
    assert recorded["autoencoder"]["ae.safetensors"] == {
        "size": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    run = config(model={"in_channels": 16, "vec_in_dim": 16, "context_in_dim": 16})
    txt, vec = load_encoders(run, models, torch.device("cpu")).text.encode(["a red circle"])
    assert (txt.shape[-1], vec.shape[-1]) == (16, 16)
    assert prepare(models, "--from", str(published)) == EXIT_OK
    assert capsys.readouterr().err.count("checksums as recorded before") == 3


def test_each_encoder_can_have_a_place_of_its_own(published: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    t5, tokenizer = str(published / "text_encoder_2"), str(published / "tokenizer_2")
    assert prepare(models, "--t5", t5, "--t5-tokenizer", tokenizer) == EXIT_OK
    assert not (models / "clip").exists()
    assert prepare(models, "--autoencoder", str(published)) == EXIT_OK
    assert sorted(json.loads((models / "encoders.json").read_text())) == ["autoencoder", "t5"]


def test_a_manifest_is_downloaded_and_verified_by_its_md5(copy: Path, tmp_path: Path) -> None:
    lines = [f"{hashlib.md5(text).hexdigest()}  {name}\n" for name, text in contents(copy).items()]
    (copy / "flux.md5").write_text("".join(lines))
    assert prepare(tmp_path / "models", "--from", str(copy / "flux.md5")) == EXIT_OK
    assert not list((tmp_path / "models").glob(".*.download"))
    (copy / "ae.safetensors").write_bytes(b"other")
    again = ("--autoencoder", str(copy / "flux.md5"), "--force")
    assert prepare(tmp_path / "models", *again) == EXIT_ERROR


def only_with_token(handler: Handler, content: bytes) -> None:
    if handler.headers.get("Authorization") == f"Bearer {TOKEN}":
        like_the_hub(handler, content)
    else:
        handler.start(401, 0, X_Error_Code="GatedRepo")


@pytest.fixture
def hub(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve the published encoders as a gated model of the Hub, whose client reads the environment anew."""
    files, siblings, paths = contents(published), list[dict[str, Any]](), dict[str, bytes]()
    for path, content in files.items():
        git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": git}
        if path.endswith(".safetensors"):
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 130}
        siblings.append(entry)
        paths[f"{NAME}/resolve/{COMMIT}/{path}"] = content
    info = {"id": NAME, "sha": COMMIT, "siblings": siblings, "private": False, "gated": "auto"}
    paths[f"api/models/{NAME}/revision/main"] = json.dumps(info).encode()
    with serving(paths) as server:
        server.responses = {path: [only_with_token] for path in server.files}
        constants = "huggingface_hub.constants."
        monkeypatch.setattr(f"{constants}ENDPOINT", server.url)
        monkeypatch.setattr(f"{constants}HF_HUB_OFFLINE", False)
        monkeypatch.setattr(f"{constants}HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(
            f"{constants}HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def test_a_gated_model_of_the_hub_needs_the_token_of_the_environment(
    hub: Server, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    models, options = tmp_path / "models", ("--from", f"hf://{NAME}")
    monkeypatch.delenv("HF_TOKEN")
    assert prepare(models, *options) == EXIT_USAGE
    assert NAME in capsys.readouterr().err
    assert not (models / "t5").exists()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert prepare(models, *options) == EXIT_OK
    assert prepare(tmp_path / "local", "--from", str(published)) == EXIT_OK
    assert contents(models) == contents(tmp_path / "local")
    assert f"/{NAME}/resolve/{COMMIT}/text_encoder_2/flax_model.msgpack" not in hub.num_requests


def test_a_file_with_another_hash_than_the_hubs_is_refused(
    hub: Server, tmp_path: Path, capsys: Capture
) -> None:
    path = f"/{NAME}/resolve/{COMMIT}/ae.safetensors"
    content = bytearray(hub.files[path])
    content[-1] ^= 1
    hub.files[path] = bytes(content)
    assert prepare(tmp_path / "models", "--autoencoder", f"hf://{NAME}@main") == EXIT_USAGE
    assert "its hash is" in capsys.readouterr().err
    assert not (tmp_path / "models/autoencoder").exists()
    content[-1] ^= 1
    hub.files[path] = bytes(content)
    assert prepare(tmp_path / "models", "--autoencoder", f"hf://{NAME}@main") == EXIT_OK


RUN = {"preset": "dev-lora", "initial_weights": "base/flux1-dev.safetensors"}


def test_what_a_file_needs_is_fetched_and_a_run_says_how(
    hub: Server, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    job, models = tmp_path / "style.yaml", tmp_path / "models"
    (tmp_path / "pictures").mkdir()
    job.write_text(json.dumps(changed(GOOD, "spec.run", RUN)))
    options = [str(job), "--data.images=pictures", "--models", str(models)]
    assert main(["run", *options, "--data", str(tmp_path), "--cpu"]) == EXIT_USAGE
    error = capsys.readouterr().err
    every = (
        f"{RUN['initial_weights']}, autoencoder/ae.safetensors, t5/config.json, clip/config.json"
    )
    assert f"not in {models}: {every}; `fluxtrain fetch` with this file gets" in error
    monkeypatch.delenv("HF_TOKEN")
    fetch = ["fetch", *options, "--from", f"hf://{NAME}"]
    assert main(fetch) == EXIT_USAGE
    assert f"accept its licence at https://huggingface.co/{NAME}" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(fetch) == EXIT_OK
    assert f"next: fluxtrain run {job} --models {models}" in capsys.readouterr().out
    assert load_file(models / "base/flux1-dev.safetensors")["weights"].tolist() == [1, 1, 1]
    names = {str(path.relative_to(models)) for path in models.rglob("*") if path.is_dir()}
    assert names == {"base", "t5", "clip", "autoencoder"}, "nothing partial is left"
    requests = hub.num_requests.total()
    assert main(fetch) == EXIT_OK
    assert hub.num_requests.total() == requests, "all is there"

    (models / "t5/config.json").unlink()
    assert main(fetch) == EXIT_USAGE, "a folder that is not whole may hold somebody's files"
    assert "fluxtrain prepare encoders --force collects it anew" in capsys.readouterr().err
    shutil.rmtree(models / "t5")
    assert main(fetch) == EXIT_OK

    (models / "base/flux1-dev.safetensors").unlink()
    assert main([*fetch[:-1], str(published), "--encoders.t5=t5xxl.safetensors",
                 "--encoders.t5_tokenizer=t5"]) == EXIT_USAGE  # fmt: skip
    assert f"t5xxl.safetensors; {published} has no such files" in capsys.readouterr().err
    assert (models / "base/flux1-dev.safetensors").exists()


def without_a_tensor(root: Path) -> None:
    path = root / "text_encoder_2/model.safetensors"
    tensors = load_file(path)
    tensors.pop("encoder.block.1.layer.1.DenseReluDense.wo.weight")
    save_file(tensors, path)


def of_another_width(root: Path) -> None:
    path = root / "text_encoder/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 40}))


def as_pickle(root: Path) -> None:
    (root / "text_encoder/model.safetensors").rename(root / "text_encoder/pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_tensor, "tensor encoder.block.1.layer.1.DenseReluDense.wo.weight is missing"),
        (of_another_width, "its config says"),
        (as_pickle, "no .safetensors file; pickles (.bin) are not read"),
        (lambda root: shutil.rmtree(root / "tokenizer_2"), "folder tokenizer_2: has no file"),
        (lambda root: (root / "ae.safetensors").unlink(), "has no file ae.safetensors"),
        (lambda root: (root / "ae.safetensors").write_bytes(b"x" * 99),
         "ae.safetensors: not a whole safetensors file"),
        (lambda root: (root / "text_encoder_2/config.json").unlink(),
         "no text encoder (config.json is missing)"),
    ],
)  # fmt: skip
def test_an_encoder_that_is_not_whole_never_appears(
    change: Any, message: str, copy: Path, tmp_path: Path, capsys: Capture
) -> None:
    change(copy)
    models = tmp_path / "models"
    assert prepare(models, "--from", str(copy)) == EXIT_USAGE
    assert message in capsys.readouterr().err
    complete = {path.name for path in models.iterdir() if not path.name.startswith(".")}
    assert complete < {"t5", "clip", "autoencoder", "encoders.json"}


def test_files_that_change_after_they_were_recorded_are_found(
    copy: Path, tmp_path: Path, capsys: Capture
) -> None:
    models = tmp_path / "models"
    assert prepare(models, "--from", str(copy)) == EXIT_OK
    path = models / "autoencoder/ae.safetensors"
    tensors = load_file(path)
    tensors["encoder.conv_in.bias"] += 1
    save_file(tensors, path)
    assert prepare(models, "--from", str(copy)) == EXIT_USAGE
    assert "autoencoder: ae.safetensors differs" in capsys.readouterr().err
    save_file(tensors, copy / "ae.safetensors")
    assert prepare(models, "--autoencoder", str(copy), "--force") == EXIT_USAGE
    record = json.loads((models / "encoders.json").read_text())
    del record["autoencoder"]
    (models / "encoders.json").write_text(json.dumps(record))
    assert prepare(models, "--autoencoder", str(copy), "--force") == EXIT_OK


def test_an_empty_folder_is_filled_and_a_half_one_needs_force(
    published: Path, tmp_path: Path, capsys: Capture
) -> None:
    models = tmp_path / "models"
    (models / "t5").mkdir(parents=True)
    (models / "clip").mkdir()
    (models / "clip/config.json").write_text("{}")
    assert prepare(models, "--from", str(published)) == EXIT_USAGE
    assert "--force collects it anew" in capsys.readouterr().err
    assert (models / "t5/model.safetensors").is_file()
    assert prepare(models, "--from", str(published), "--force") == EXIT_OK


def test_weights_without_a_tokenizer_are_told_what_is_missing(
    published: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert prepare(tmp_path, "--t5", str(published / "text_encoder_2")) == EXIT_USAGE
    assert "has no tokenizer, which is one of tokenizer.json, " in capsys.readouterr().err
    own = ("--t5-tokenizer", str(published / "tokenizer_2"))
    assert prepare(tmp_path, "--t5", str(published / "text_encoder_2"), *own) == EXIT_OK


def test_a_full_disk_is_an_error_of_the_target(
    published: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copyfile(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    assert prepare(tmp_path, "--autoencoder", str(published)) == EXIT_STORAGE
    error = capsys.readouterr().err
    assert f"{tmp_path}/.autoencoder.partial/ae.safetensors: No space left on device" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--from: give --from, or --t5, --clip or --autoencoder"),
        (("--from", "hf://alone"), "--from: got 'hf://alone'; allowed: a folder"),
        (("--t5", "/nowhere"), "--t5: got '/nowhere'; no such folder"),
        (("--clip-tokenizer", "/"), "--clip-tokenizer: got '/'; needs the encoder"),
    ],
)
def test_a_place_that_cannot_be_is_an_error_of_its_option(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: Capture
) -> None:
    assert prepare(tmp_path, *options) == EXIT_USAGE
    assert message in capsys.readouterr().err
