"""`make setup`: which torch it installs, from a stand-in of PyTorch's index on loopback."""

from __future__ import annotations

import base64
import hashlib
import http.server
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from supply_chain import torch_wheel
from tests.paths import ROOT

from fluxtrain.runtime.devices import missing_gpus

CONSTRAINTS = "numpy==2.4.0\nnvidia-nccl-cu13==2.30.7\ntorch==2.15.0\ntriton==3.9.0\ntqdm==4.67.1\n"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, "cpu"),
        ({"dev/dri/renderD128": ""}, "cpu"),
        ({"dev/nvidiactl": "", "dev/nvidia0": ""}, "cuda"),
        ({"dev/kfd": ""}, "rocm6.4"),
        ({"dev/kfd": "", "opt/rocm/.info/version": "7.0.2-56\n"}, "rocm7.0"),
        ({"dev/kfd": "", "opt/rocm/.info/version": "unknown\n"}, "rocm6.4"),
        ({"dev/kfd": "", "dev/nvidia0": ""}, "rocm6.4"),
    ],
)
def test_the_kind_of_the_machine(tmp_path: Path, files: dict[str, str], kind: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert torch_wheel.kind_of_machine(tmp_path) == kind


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("2.15.0", "cuda"),
        ("2.11.0+cu130", "cuda"),
        ("2.11.0+cpu", "cpu"),
        ("2.9.1+rocm6.4", "rocm6.4"),
        ("2.10.0a0+git1234", "git1234"),
    ],
)
def test_the_kind_of_an_installed_torch(version: str, kind: str) -> None:
    assert torch_wheel.kind_of_torch(version) == kind


def test_constraints_pin_the_installed_torch_and_leave_its_libraries_to_it() -> None:
    lines = list(torch_wheel.pinned(CONSTRAINTS, "2.9.1+rocm6.4"))
    assert lines == ["numpy==2.4.0", "tqdm==4.67.1", "torch==2.9.1+rocm6.4"]


def test_the_range_is_that_of_the_project() -> None:
    assert f'"{torch_wheel.RANGE}",' in (ROOT / "pyproject.toml").read_text()


def test_the_error_of_a_wrong_wheel_names_what_make_setup_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.hip", None)
    (index,) = re.findall(r"^TORCH_INDEX \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    kind = torch_wheel.kind_of_machine(tmp_path)
    reason = missing_gpus(tmp_path / "dev")
    assert reason is not None
    assert f"make setup TORCH={kind}, or pip install torch --index-url {index}/{kind}" in reason


def wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel without code into ``folder``."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        rows.append(f"{path},sha256={digest.decode()},{len(text)}\n")
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """Return the address of an index that has three kinds of torch."""
    root = tmp_path / "whl"
    for version in ("2.8.0+rocm6.4", "2.9.1+rocm6.4", "2.10.0+rocm6.4"):
        wheel(root / "rocm6.4/torch", "torch", version)
    wheel(root / "rocm7.0/torch", "torch", "2.11.0+rocm7.0")
    wheel(root / "cpu/torch", "torch", "2.12.0+cpu")
    wheel(root / "rocm5.0/torch", "torch", "2.1.0+rocm5.0")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=root))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return the Python of a new environment, with pip."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    return tmp_path / "venv/bin/python"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return the folder of a project that needs torch, and no other package."""
    folder = tmp_path / "project"
    folder.mkdir()
    text = '[build-system]\nrequires=[]\nbuild-backend="backend"\nbackend-path=["."]\n'
    (folder / "pyproject.toml").write_text(text)
    backend = """
import zipfile
def get_requires_for_build_editable(config_settings=None): return []
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "small-1.0-py3-none-any.whl"
    info = "small-1.0.dist-info/"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as archive:
        needs = "Metadata-Version: 2.1\\nName: small\\nVersion: 1.0\\nRequires-Dist: torch>=2.9\\n"
        archive.writestr(info + "METADATA", needs)
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(info + "RECORD", "")
    return name
"""
    (folder / "backend.py").write_text(backend)
    return folder


@pytest.mark.proof
@pytest.mark.slow
def test_torch_comes_from_the_index_once_and_stays_until_another_kind_is_asked_for(
    index: str, python: Path, project: Path
) -> None:
    def setup(torch: str, address: str = index) -> tuple[int, str]:
        command = [python, "-m", "supply_chain.torch_wheel", torch, address, project]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    def version() -> str:
        program = "import importlib.metadata as m; print(m.version('torch'))"
        return subprocess.check_output([python, "-c", program], text=True).strip()

    code, text = setup("rocm6.4")
    assert code == 0, text
    assert f"install torch>=2.9 --force-reinstall --no-deps --index-url {index}/rocm6.4" in text
    assert version() == "2.10.0+rocm6.4"
    for torch in ("auto", "rocm6.4"):  # an address that nothing listens on: nothing is asked
        code, text = setup(torch, "http://127.0.0.1:9/whl")
        assert code == 0, text
        assert version() == "2.10.0+rocm6.4"
    assert setup("cpu")[0] == 0
    assert version() == "2.12.0+cpu"
    code, text = setup("rocm5.0")
    assert code == 1
    assert f"{index}/rocm5.0: no torch>=2.9 for this Python; set TORCH= or TORCH_INDEX=" in text
    code, text = setup("2.10")
    assert code == 1
    assert text == "TORCH=2.10: must be auto, cpu, cuda or rocmX.Y, such as rocm6.4\n"
