"""What one process has compiled, another with the key of the job does not compile again."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch
from tests.trainer.ranks import CPU, FORKED, start_process

from fluxtrain.contract.process import ENV_RENDEZVOUS_KEY
from fluxtrain.parallel import compile
from fluxtrain.parallel.compile import CompileCache

KEY = b"k" * 32
Answer = tuple[bool, int, int]
"""Whether there was a file of the job; graphs that torch's cache had, and did not have."""


def compile_one(folder: Path, key: bytes, own: Path, answers: SimpleQueue[Answer]) -> None:
    """Compile a function in a process whose own cache is the empty folder ``own``."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    from torch._dynamo.utils import counters
    from torch._inductor import config as inductor

    inductor.compile_threads = 1
    inductor.cpp_cache_precompile_headers = False  # they take longer than all the rest
    cache = CompileCache(folder, CPU, key)
    is_loaded = cache.load()
    function: Callable[[torch.Tensor], torch.Tensor] = torch.compile(lambda x: x.sin() + 1)
    assert torch.allclose(function(torch.ones(3)), torch.ones(3).sin() + 1)
    if not is_loaded:
        cache.save()
    found = counters["inductor"]
    answers.put((is_loaded, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]))


def compiled(folder: Path, key: bytes, own: Path) -> Answer:
    answers: SimpleQueue[Answer] = FORKED.SimpleQueue()
    process = FORKED.Process(target=compile_one, args=(folder, key, own, answers))
    start_process(process)
    process.join(300)
    assert process.exitcode == 0
    return answers.get()


@pytest.mark.torch_range
@pytest.mark.proof
def test_a_process_with_the_key_of_the_job_has_what_another_has_compiled(tmp_path: Path) -> None:
    assert compiled(tmp_path, KEY, tmp_path / "first") == (False, 0, 1)
    assert compiled(tmp_path, KEY, tmp_path / "second") == (True, 1, 0)


def test_processors_with_other_instructions_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = CompileCache(tmp_path, CPU, KEY).path
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert CompileCache(tmp_path, CPU, KEY).path != here


def fill(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)


@pytest.mark.parametrize("content", [b"", b"short", bytes(100), b"\x80\x04."])
def test_a_file_without_the_signature_is_not_unpickled(
    tmp_path: Path,
    content: bytes,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", None)  # a call would raise
    cache = CompileCache(tmp_path, CPU, KEY)
    fill(cache.path, content)
    assert not cache.load()
    assert f"{cache.path}: not signed by this job" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["name", "content"])
def test_a_signature_is_of_one_name_and_content(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = list[bytes]()
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"entries", None))
    cache = CompileCache(tmp_path, CPU, KEY)
    cache.save()
    cache.load()
    assert loaded == [b"entries"]
    if change == "content":
        cache.path.write_bytes(cache.path.read_bytes()[:-1] + b"S")
    else:
        other = CompileCache(tmp_path, torch.device("cpu", 1), KEY)
        cache.path.rename(other.path)
        cache = other
    assert not cache.load()
    assert len(loaded) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch.__version__", "9.9"),
        ("torch.version.cuda", "99.9"),
        ("platform.libc_ver", lambda: ("glibc", "9.9")),
        ("platform.python_version", lambda: "9.9"),
        ("_version", lambda package: "9.9"),
    ],
)
def test_another_version_has_another_file(
    tmp_path: Path, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = CompileCache(tmp_path, CPU, KEY).path
    assert CompileCache(tmp_path, CPU, KEY).path == before
    monkeypatch.setattr(f"{compile.__name__}.{name}", value)
    assert CompileCache(tmp_path, CPU, KEY).path != before


def test_only_a_job_with_a_key_has_a_file(tmp_path: Path) -> None:
    assert CompileCache.of(tmp_path, CPU, {}) is None
    (tmp_path / "key").write_bytes(KEY)
    cache = CompileCache.of(tmp_path, CPU, {ENV_RENDEZVOUS_KEY: str(tmp_path / "key")})
    assert cache is not None
    assert cache.path.parent == tmp_path / "compiled"


def test_a_folder_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"entries", None))
    (tmp_path / "compiled").write_text("a file")
    CompileCache(tmp_path, CPU, KEY).save()
    assert (tmp_path / "compiled").read_text() == "a file"
