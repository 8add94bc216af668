"""``fluxtrain push``: what comes to the Hub, seen by a stand-in of its API, and what does not."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tests.trainer.adapter.random_adapters import adapter_of

from fluxtrain.adapter.file import readers, write_adapter
from fluxtrain.adapter.publish import Publication
from fluxtrain.cli import main
from fluxtrain.contract.run.adapter import AdapterConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of the client
]
REPO, TOKEN = "somebody/my-style", "hf_secret"
HOSTILE = 'a `heart` | ---\n<script>alert(1)</script>: \'ü\' """'


class Hub(ThreadingHTTPServer):
    """Repositories of models: their files, and whether they are private."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files, self.is_private = dict[str, bytes](), dict[str, bool]()
        self.objects = dict[str, bytes]()
        self.num_commits = 0


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _lfs_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.path.partition("?")[0].startswith(f"/api/models/{REPO}"):
            if REPO not in self.server.is_private:
                return self._send(404, {"error": "none"}, "RepoNotFound")
            siblings = [{"rfilename": name} for name in self.server.files]
            is_private = self.server.is_private[REPO]
            return self._send(200, {"id": REPO, "private": is_private, "siblings": siblings})
        return self._send(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub = self.server
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "no"})
        if self.path == "/api/repos/create":
            given = json.loads(body)  # newer clients send the visibility
            hub.is_private[REPO] = given.get("private", given.get("visibility") == "private")
            return self._send(200, {"url": f"{hub.url}/{REPO}", "id": REPO, "name": REPO})
        if self.path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            return self._send(200, {"files": [*map(self._mode, json.loads(body)["files"])]})
        if self.path.endswith("/objects/batch"):
            given = json.loads(body)["objects"]
            return self._send(200, {"transfer": "basic", "objects": [*map(self._upload, given)]})
        assert "/commit/" in self.path
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.files[value["path"]] = hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del hub.files[value["path"]]
        hub.num_commits += 1
        address = f"{hub.url}/{REPO}/commit/{'c' * 40}"
        return self._send(200, {"commitUrl": address, "commitOid": "c" * 40, "success": True})

    def do_PUT(self) -> None:
        if length := self.headers["Content-Length"]:
            content = self.rfile.read(int(length))
        else:
            content = b"".join(self._chunks())
        self.server.objects[_lfs_hash(content)] = content
        self._send(200, {})

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        is_large = not file["path"].endswith(".md")
        mode = {"path": file["path"], "uploadMode": "lfs" if is_large else "regular"}
        there = self.server.files.get(file["path"])
        hashed = None if there is None else (_lfs_hash if is_large else _git_hash)(there)
        return mode | {"shouldIgnore": False, "oid": hashed}

    def _upload(self, entry: dict[str, Any]) -> dict[str, Any]:
        action = {"href": f"{self.server.url}/put/{entry['oid']}"}
        return {"oid": entry["oid"], "size": entry["size"], "actions": {"upload": action}}

    def _send(self, code: int, value: dict[str, Any], error: str | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        if error is not None:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a Hub without repositories, at which the client and its token are."""
    with Hub() as server:
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        constants = "huggingface_hub.constants."
        monkeypatch.setattr(f"{constants}ENDPOINT", server.url)
        monkeypatch.setattr(f"{constants}HF_HUB_OFFLINE", False)
        monkeypatch.setattr(f"{constants}HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(f"{constants}HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()
        thread.join()


def add_samples(run: Path, step: int, *prompts: str) -> None:
    folder = run / f"samples/step_{step:07d}"
    folder.mkdir(parents=True)
    for index, prompt in enumerate(prompts):
        info = PngInfo()
        info.add_itxt("prompt", prompt)
        picture = Image.new("RGB", (8, 8), (step % 256, index, 0))
        picture.save(folder / f"{index:02d}.png", pnginfo=info)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run with a LoRA and samples."""
    run, adapter = tmp_path / "runs/style", AdapterConfig(rank=2)
    values = {"preset": "dev-lora", "adapter": adapter.model_dump(mode="json")}
    dev = {"model": {"guidance_embed": True}, "initial_weights": "/secret/flux1-dev.safetensors"}
    config = resolve({**values, **dev})
    (run / "adapters").mkdir(parents=True)
    (run / "config.json").write_text(config.model_dump_json())
    path = run / "adapters/lora.safetensors"
    write_adapter(path, adapter_of(adapter), "kohya", torch.float32)
    add_samples(run, 100, "old", "older", "oldest")
    add_samples(run, 200, HOSTILE, "a house")
    return run


def front_matter(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    found = yaml.safe_load(front)
    assert isinstance(found, dict)
    return found


def test_a_run_is_published_once(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["push", str(run), REPO, "--trigger", "ohwx"]
    assert main(options) == EXIT_OK
    assert hub.is_private == {REPO: True}
    card = hub.files.pop("README.md").decode()
    assert hub.files == {
        "lora.safetensors": (run / "adapters/lora.safetensors").read_bytes(),
        "images/00.png": (run / "samples/step_0000200/00.png").read_bytes(),
        "images/01.png": (run / "samples/step_0000200/01.png").read_bytes(),
    }
    front = front_matter(card)
    assert front["base_model"] == "black-forest-labs/FLUX.1-dev"
    assert front["base_model_relation"] == "adapter"
    assert front["library_name"] == "diffusers"
    assert front["instance_prompt"] == "ohwx"
    assert front["license"] == "other"
    assert front["license_link"].startswith("https://huggingface.co/black-forest-labs/FLUX.1-dev/")
    assert {"flux", "lora", "template:sd-lora"} <= set(front["tags"])
    assert front["widget"][0] == {
        "text": " ".join(HOSTILE.split()),
        "output": {"url": "images/00.png"},
    }
    body = card.split("---\n", 2)[2]
    assert f'load_lora_weights("{REPO}", weight_name="lora.safetensors")' in body
    assert "ComfyUI" in body
    assert "rank 2" in body
    assert "/secret" not in card, "paths of this machine are nobody's"

    hub.files["README.md"] = card.encode()
    assert hub.num_commits == 1
    assert main(options) == EXIT_OK
    assert hub.num_commits == 1, "nothing has changed"
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err + card
    add_samples(run, 300, "newest")
    assert main(options) == EXIT_OK
    assert sorted(hub.files) == ["README.md", "images/00.png", "lora.safetensors"]


@pytest.mark.parametrize(
    ("model", "weights", "base"),
    [
        ({}, "flux1-dev.safetensors", "FLUX.1-dev"),
        ({}, "flux1-krea-dev.safetensors", "FLUX.1-Krea-dev"),
        ({}, "flux1-kontext-dev.safetensors", "FLUX.1-Kontext-dev"),
        ({}, "dev-depth-of-field.safetensors", "FLUX.1-dev"),
        ({"condition": "canny", "in_channels": 128}, "mine.safetensors", "FLUX.1-Canny-dev"),
        ({"condition": "fill", "in_channels": 384}, "from-krea.safetensors", "FLUX.1-Fill-dev"),
    ],
)
def test_the_base_is_that_of_the_condition_or_of_the_weights_name(
    model: dict[str, Any], weights: str, base: str
) -> None:
    """Names alone do not say that a model of dev's inputs is Depth's."""
    controls = "control" if model else None
    data = {"images": "pictures", "controls": controls}
    run = resolve({"preset": "dev-lora", "model": model, "initial_weights": weights, "data": data})
    found = Publication(run, Path("lora.safetensors"), step=None, images=[], readers="")
    assert found.base == f"black-forest-labs/{base}"


def test_a_base_that_nobody_can_get_is_not_named(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["model"] |= {"hidden_size": 128, "num_heads": 4, "axes_dim": [8, 12, 12]}
    (run / "config.json").write_text(json.dumps(config))
    assert main(["push", str(run), REPO, "--dry-run", "--trigger=i`nk"]) == EXIT_OK
    card = (run / "README.md").read_text()
    assert not {"base_model", "license_link"} & front_matter(card).keys()
    assert "black-forest-labs" not in card
    assert "Write `` i`nk `` in the prompt." in card


@pytest.mark.parametrize("repo", ["me/a--b", "me/x.git", "me/" + "x" * 200])
def test_a_name_that_the_hub_does_not_take_is_a_wrong_option(
    hub: Hub, run: Path, repo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), repo]) == EXIT_USAGE
    assert "REPO: got 'me/" in capsys.readouterr().err


def test_nothing_becomes_public_by_itself(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.is_private[REPO] = False
    assert main(["push", str(run), REPO]) == EXIT_USAGE
    assert "give --public" in capsys.readouterr().err
    assert hub.files == {}
    assert main(["push", str(run), REPO, "--public"]) == EXIT_OK
    assert "lora.safetensors" in hub.files


def test_the_card_can_be_looked_at_first(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert main(["push", str(run), REPO, "--dry-run"]) == EXIT_OK
    assert "nothing was sent" in capsys.readouterr().out
    assert front_matter((run / "README.md").read_text())["base_model_relation"] == "adapter"
    assert main(["push", str(run), REPO, "--dry-run"]) == EXIT_OK
    (run / "README.md").write_text("mine")
    assert main(["push", str(run), REPO, "--dry-run"]) == EXIT_USAGE
    assert (run / "README.md").read_text() == "mine"


def test_a_token_that_is_missing_or_may_not_write(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert main(["push", str(run), REPO]) != EXIT_OK
    error = capsys.readouterr().err
    assert "the token may not write there" in error
    assert "hf_other" not in error
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", str(run), REPO]) == EXIT_USAGE
    assert "huggingface.co/settings/tokens, or run `hf auth login`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "repo", "message"),
    [
        ("config.json", REPO, "give the output folder of a run"),
        ("adapters/lora.safetensors", REPO, "`fluxtrain adapter convert"),
        (None, "style", "must be OWNER/NAME"),
    ],
)
def test_what_is_missing_is_named(
    hub: Hub,
    run: Path,
    damage: str | None,
    repo: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if damage:
        (run / damage).unlink()
    assert main(["push", str(run), repo]) == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert hub.num_commits == 0


def test_the_programs_that_read_a_file_are_named() -> None:
    plain = adapter_of(AdapterConfig(rank=2))
    assert "not diffusers" in readers(plain, "bfl")
    for layout in ("kohya", "diffusers", "ai-toolkit"):
        assert "diffusers" in readers(plain, layout).replace("not diffusers", "")
    assert "not diffusers" in readers(adapter_of(AdapterConfig(kind="lokr", rank=2)), "kohya")
    assert "merge" in readers(adapter_of(AdapterConfig(rank=2, dora=True)), "kohya")
