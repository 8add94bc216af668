"""``fluxtrain from-env``: the guide's variables in, the file of a LoRA out, also after an interruption."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import socket
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from tests.trainer.commands import Forked, start
from tests.trainer.fetch import guide
from tests.trainer.fetch.servers import FileServer

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_STOPPED, EXIT_USAGE
from fluxtrain.imports.variables import VARIABLES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return guide.published(tmp_path_factory.mktemp("published"))


class Container:
    """The guide's container: its volume at ``workspace``, files in ``opt``, and where it fetches from."""

    def __init__(self, folder: Path, published: Path, server: FileServer) -> None:
        self.workspace, opt = folder / "workspace", folder / "opt" / "sd-scripts"
        opt.mkdir(parents=True)
        self.output = self.workspace / "output"
        self.data = self.workspace / "dataset"
        self.files = guide.write_files(opt, str(self.data / "images"))
        self.places = {
            "DATASET_HOST": f"{server.url}/api/v1/datasets/download",
            "DATASET_PATH": str(self.data),
            "OUTPUT_PATH": str(self.output),
        }
        server.files[f"api/v1/datasets/download/{guide.NAME}"] = guide.archive()
        self.options = [
            *("from-env", "--cpu", f"--models={self.workspace / 'flux'}", f"--from={published}"),
            *guide.SMALL,
        ]

    def environment(self, **changes: str) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        return {**own, **self.files, **self.places, **guide.variables(**changes)}


@pytest.fixture
def container(tmp_path: Path, published: Path, server: FileServer) -> Container:
    return Container(tmp_path, published, server)


def test_a_spot_interruption_goes_on_and_the_file_has_the_guides_name(
    container: Container, server: FileServer, tmp_path: Path
) -> None:
    errors = tmp_path / "errors"
    environment = container.environment()
    first = start(*container.options, log=errors, pause=0.2, **environment)
    checkpoints = container.output / "checkpoints"
    wait_for(lambda: len(list(checkpoints.glob("step_*"))) > 1, first, errors)
    first.send_signal(signal.SIGTERM)
    assert first.wait(120) == EXIT_STOPPED, errors.read_text()
    stopped = max(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))
    assert f"checkpoint of step {stopped}" in errors.read_text()
    requests = server.requests.total()

    again = start(*container.options, log=errors, **environment)
    assert again.wait(300) == 0, errors.read_text()
    assert server.requests.total() == requests, "the data set is there"
    assert f"resumed after step {stopped}" in errors.read_text()
    records = map(json.loads, (container.output / "metrics.jsonl").read_text().splitlines())
    assert max(record["step"] for record in records) == guide.STEPS
    (final,) = (path for path in container.output.glob("*.safetensors") if "-step" not in path.name)
    host, _, began = final.stem.rpartition("-")
    assert (host, began.isdecimal()) == (socket.gethostname(), True), (
        "as the guide's script names it"
    )
    assert (container.output / f"{final.stem}-step00000012.safetensors").is_file()
    with safe_open(final, "pt") as file:
        metadata = file.metadata()
    assert (metadata["ss_network_dim"], metadata["ss_steps"]) == ("4", str(guide.STEPS))
    third = start(*container.options, log=errors, **environment)
    assert third.wait(120) == 0
    assert f"{final}: it is there already" in errors.read_text()
    other = start(*container.options, log=errors, **container.environment(OUTPUT_NAME="other"))
    assert other.wait(120) == EXIT_USAGE
    renamed = container.output / "other.safetensors"
    step = f"fluxtrain adapter convert {container.output} --output {renamed}"
    assert step in errors.read_text()
    assert main([*shlex.split(step)[1:]]) == 0
    assert load_file(renamed).keys() == load_file(final).keys()


def wait_for(done: Callable[[], bool], process: Forked, log: Path) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_all_that_is_missing_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BASE_MODEL", "flux")
    monkeypatch.setenv("DATASET_PATH", str(tmp_path / "dataset"))
    monkeypatch.setenv("SAMPLE_PROMPTS", "/opt/sd-scripts/prompts.txt")
    assert main(["from-env"]) == EXIT_USAGE
    name, config, prompts = capsys.readouterr().err.splitlines()
    assert "$DATASET_NAME: must be OWNER/NAME of a data set on Kaggle, or a URL such as" in name
    assert "$DATASET_CONFIG: must name kohya's data set config, .json or .toml" in config
    assert "$SAMPLE_PROMPTS: got '/opt/sd-scripts/prompts.txt'; there is no such file" in prompts


def fetched(container: Container, monkeypatch: pytest.MonkeyPatch, **changes: str) -> int:
    for name, value in container.environment(**changes).items():
        monkeypatch.setenv(name, value)
    return main([*container.options[:3], "--from=/nowhere", *guide.SMALL])


def zip_of(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, "x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<html>sign in</html>", "sends no zip archive; it may want a login: or put the pictures"),
        (zip_of("../a.jpg"), "its name leads out of the folder"),
        (None, "404"),
        (
            zip_of("a.jpg").replace(b"x", b"y", 1),
            "Bad CRC-32 for file 'a.jpg'; the same command fetches",
        ),
    ],
)
def test_a_data_set_that_cannot_be_had_says_what_to_do(
    content: bytes | None, says: str, container: Container, server: FileServer,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = f"api/v1/datasets/download/{guide.NAME}"
    del server.files[path]
    if content is not None:
        server.files[path] = content
    assert fetched(container, monkeypatch) != 0
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert not list(container.data.glob("*.zip")), "the next fetch begins anew"
    server.files[path] = zip_of("images\\a.jpg")
    fetched(container, monkeypatch)
    assert (container.data / "images/a.jpg").read_bytes() == b"x", "of a writer on Windows"
    monkeypatch.setenv("DATASET_NAME", "somebody/other")
    assert fetched(container, monkeypatch, DATASET_NAME="somebody/other") == EXIT_USAGE
    error = capsys.readouterr().err
    assert f"{container.data}, $DATASET_PATH, has {guide.NAME} already: empty it" in error


def test_a_data_set_of_the_hub_comes_to_the_same_folder(
    container: Container, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["datasets/owner/name/images/a.jpg"] = b"a picture"
    assert fetched(container, monkeypatch, DATASET_NAME="hf://datasets/owner/name") == EXIT_USAGE
    assert (container.data / "images/a.jpg").read_bytes() == b"a picture"
