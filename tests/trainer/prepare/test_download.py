"""Downloads from a server that stalls, truncates, redirects and lies: the right bytes or a plain error."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.trainer.prepare.lying_server import (
    Answer,
    Server,
    as_the_hub,
    busy,
    cut_off,
    cut_off_unsaid,
    drips,
    forbidden,
    hangs_up,
    honest,
    never_answers,
    nonsense,
    other_range,
    redirect,
    serving,
    slowly,
    stalls,
    too_many_bytes,
    without_ranges,
    wrong_bytes,
)

from fluxtrain.errors import ConfigError, DataError
from fluxtrain.prepare.cc12m.build import prepare_cc12m
from fluxtrain.prepare.cc12m.source import open_source
from fluxtrain.prepare.download.download import download
from fluxtrain.prepare.download.http import DownloadError, HttpClient
from fluxtrain.prepare.download.hub import open_hub
from fluxtrain.prepare.download.manifest import parse, path_fault, read_manifest

FILES = {f"part/file-{i}.bin": random.Random(i).randbytes(200_000 + i) for i in range(3)}
FILES["empty.bin"] = b""
LINK = HttpClient(timeout=10, attempts=3, backoff=0.01)
IMPATIENT = HttpClient(timeout=0.5, attempts=3, backoff=0.01, min_rate=1000)


def md5_list(files: dict[str, bytes]) -> bytes:
    return b"".join(
        f"{hashlib.md5(content).hexdigest()}  ./{name}\n".encode()
        for name, content in files.items()
    )


@pytest.fixture
def server() -> Iterator[Server]:
    with serving({f"sets/{name}": content for name, content in FILES.items()}) as server:
        server.files["/metadata/some.uri"] = f"{server.url}/sets\n".encode()
        server.files["/metadata/some.md5"] = md5_list(FILES)
        yield server


def fetch(server: Server, output: Path, **more: Any) -> int:
    options: dict[str, Any] = {"link": LINK, "connections": 4, **more}
    stream = io.StringIO()
    return download(f"{server.url}/metadata/some.uri", output, stream=stream, **options)


def content_of(output: Path) -> dict[str, bytes]:
    files = [path for path in output.rglob("*") if path.is_file() and path.name != ".verified"]
    return {str(path.relative_to(output)): path.read_bytes() for path in files}


def test_what_a_manifest_names_is_brought_and_asked_for_once(
    server: Server, tmp_path: Path
) -> None:
    assert fetch(server, tmp_path / "set") == 4
    assert content_of(tmp_path / "set") == FILES
    assert fetch(server, tmp_path / "set") == 0
    assert all(server.asked[f"/sets/{name}"] == 1 for name in FILES)


ONCE = [
    cut_off,
    stalls,
    never_answers,
    drips,
    hangs_up,
    busy,
    nonsense,
    wrong_bytes,
    cut_off_unsaid,
]


@pytest.mark.parametrize("fault", [*ONCE, too_many_bytes], ids=lambda fault: fault.__name__)
def test_what_goes_wrong_once_is_made_good(server: Server, tmp_path: Path, fault: Answer) -> None:
    server.answers["/sets/part/file-1.bin"] = [fault, honest]
    fetch(server, tmp_path / "set", link=IMPATIENT)
    assert content_of(tmp_path / "set") == FILES


@pytest.mark.parametrize("fault", [*ONCE, forbidden], ids=lambda fault: fault.__name__)
def test_what_stays_wrong_is_an_error_after_few_attempts_and_the_rest_is_brought(
    server: Server, tmp_path: Path, fault: Answer
) -> None:
    server.answers["/sets/part/file-1.bin"] = [fault]
    with pytest.raises(DownloadError, match=r"1 of 4 files could not be had(.|\n)*file-1\.bin"):
        fetch(server, tmp_path / "set", link=IMPATIENT)
    assert server.asked["/sets/part/file-1.bin"] <= 3
    others = {name: content for name, content in FILES.items() if "1" not in name}
    found = content_of(tmp_path / "set")
    assert {name: content for name, content in found.items() if "partial" not in name} == others
    server.answers.clear()
    assert fetch(server, tmp_path / "set") == 1
    assert content_of(tmp_path / "set") == FILES


def test_it_goes_on_where_it_was_cut_off(server: Server, tmp_path: Path) -> None:
    server.answers["/sets/part/file-2.bin"] = [cut_off, honest]
    fetch(server, tmp_path / "set")
    assert [asked for asked in server.ranges if asked] == ["bytes=100001-"]


@pytest.mark.parametrize("rest", [without_ranges, other_range], ids=lambda rest: rest.__name__)
def test_a_server_that_cannot_go_on_is_asked_for_everything(
    server: Server, tmp_path: Path, rest: Answer
) -> None:
    server.answers["/sets/part/file-2.bin"] = [cut_off, rest, honest]
    fetch(server, tmp_path / "set")
    assert content_of(tmp_path / "set") == FILES


@pytest.mark.parametrize("left", [b"", b"other", FILES["part/file-0.bin"], b"x" * 300_000])
def test_what_is_left_of_anything_does_no_harm(server: Server, tmp_path: Path, left: bytes) -> None:
    (tmp_path / "set" / "part").mkdir(parents=True)
    (tmp_path / "set" / "part" / "file-0.bin.partial").write_bytes(left)
    (tmp_path / "set" / "part" / "file-1.bin").write_bytes(left)
    fetch(server, tmp_path / "set")
    assert content_of(tmp_path / "set") == FILES
    assert server.asked["/sets/part/file-0.bin"] == (
        0 if left == FILES["part/file-0.bin"] else 2 if left else 1
    )


def test_a_file_that_changes_afterwards_is_brought_again(server: Server, tmp_path: Path) -> None:
    fetch(server, tmp_path / "set")
    changed = tmp_path / "set" / "part" / "file-0.bin"
    changed.write_bytes(b"changed")
    assert fetch(server, tmp_path / "set") == 1
    status = changed.stat()
    changed.write_bytes(b"y" * len(FILES["part/file-0.bin"]))
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a bad disk would
    assert fetch(server, tmp_path / "set") == 0
    assert fetch(server, tmp_path / "set", verify=True) == 4
    assert content_of(tmp_path / "set") == FILES


def test_redirects_are_followed_to_servers_only(server: Server, tmp_path: Path) -> None:
    path = "/sets/part/file-0.bin"
    server.files["/elsewhere"] = FILES["part/file-0.bin"]
    server.answers[path] = [redirect(f"{server.url}/elsewhere")]
    fetch(server, tmp_path / "set")
    assert content_of(tmp_path / "set") == FILES
    for number, to in enumerate(["file:///etc/passwd", "ftp://127.0.0.1/x", f"{server.url}{path}"]):
        server.answers[path] = [redirect(to)]
        with pytest.raises(DownloadError, match=r"file-0\.bin"):
            fetch(server, tmp_path / f"other{number}")
    assert server.asked[path] < 60  # a circle is left after a few rounds


def test_a_link_from_https_is_not_followed_to_http(tmp_path: Path) -> None:
    (tmp_path / "some.uri").write_text("http://example.org/sets")
    (tmp_path / "some.md5").write_bytes(md5_list(FILES))
    assert len(read_manifest(str(tmp_path / "some.uri"), None, LINK)) == 4
    from fluxtrain.prepare.download.manifest import _refuse_downgrade

    with pytest.raises(DataError, match="came by https"):
        _refuse_downgrade("https://example.org/some.md5", "http://example.org/sets")


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a\\b", "", "..", "."),
        *("a\x00b", "a\nb", "x" * 1025, ".verified", "a.partial", "a.partial/x"),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    assert path_fault(path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("d41d8cd98f00b204e9800998ecf8427e  ../../x", "leads out"),
        ("d41d8cd98f00b204e9800998ecf8427e  a\nd41d8cd98f00b204e9800998ecf8427e *a", "given twice"),
        ("d41d8cd98f00b204e9800998ecf8427e  a\nd41d8cd98f00b204e9800998ecf8427e  a/b", "a folder"),
        ("d41d8cd98f  a", "line 1"),
        ("<html>not found</html>", "not an MD5 and a path"),
        ("\n\n", "names no files"),
    ],
)
def test_a_manifest_that_is_wrong_is_named_with_its_line(text: str, fault: str) -> None:
    with pytest.raises(DataError, match=rf"some\.md5:(.|\n)*{fault}"):
        parse("some.md5", text, "http://example.org")


def test_a_manifest_that_is_none_is_the_flags_fault(tmp_path: Path) -> None:
    for given in ("nowhere.md5", "set.json", ""):
        with pytest.raises(ConfigError, match="--manifest"):
            read_manifest(given, None, LINK)
    (tmp_path / "a.uri").write_text("file:///etc")
    with pytest.raises(DataError, match="not one URL"):
        read_manifest(str(tmp_path / "a.uri"), None, LINK)


def test_a_mounted_volume_is_read_as_a_server_is(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / "volume" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "volume" / name).write_bytes(content)
    (tmp_path / "volume" / "some.md5").write_bytes(md5_list(FILES))
    manifest = str(tmp_path / "volume" / "some.md5")
    assert download(manifest, tmp_path / "set", link=LINK, stream=io.StringIO()) == 4
    assert content_of(tmp_path / "set") == FILES
    (tmp_path / "volume" / "empty.bin").unlink()
    with pytest.raises(DownloadError, match=r"empty\.bin: No such file"):
        download(manifest, tmp_path / "other", link=LINK, stream=io.StringIO())


def test_killed_at_random_moments_it_goes_on_to_the_same_bytes(
    server: Server, tmp_path: Path
) -> None:
    server.answers = {f"/sets/{name}": [slowly] for name in FILES if FILES[name]}
    arguments = ["--manifest", f"{server.url}/metadata/some.uri", "--output", str(tmp_path / "set")]
    started = [sys.executable, "-m", "fluxtrain.cli", "prepare", "download", *arguments]
    rng, kills = random.Random(0), 0
    for _ in range(6):
        run = subprocess.Popen([*started, "--connections", "2"], stderr=subprocess.PIPE)
        try:
            run.communicate(timeout=rng.uniform(0.3, 0.7))
        except subprocess.TimeoutExpired:
            run.kill()
            run.communicate()
            kills += 1
    subprocess.run(started, check=True, capture_output=True)
    print(f"\nkilled {kills} times")
    assert content_of(tmp_path / "set") == FILES


def raw_tar(numbers: range) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in numbers:
            image = io.BytesIO()
            Image.new("RGB", (260 + number, 300), (number, 7, 9)).save(image, "JPEG")
            for suffix, content in {"jpg": image.getvalue(), "txt": b"one colour"}.items():
                header = tarfile.TarInfo(f"{number:09d}.{suffix}")
                header.size = len(content)
                tar.addfile(header, io.BytesIO(content))
    return buffer.getvalue()


def tars_of(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output.glob("*.tar"))}


def test_tars_are_cleaned_as_they_come_from_a_server_and_not_kept(tmp_path: Path) -> None:
    raw = {f"raw/{i:04d}.tar": raw_tar(range(3 * i, 3 * i + 3)) for i in range(3)}
    for name, content in raw.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with serving({**raw, "some.md5": md5_list(raw)}) as server:
        server.answers["/raw/0001.tar"] = [cut_off, honest]
        source = open_source(f"{server.url}/some.md5", LINK)
        report = prepare_cc12m(source, tmp_path / "set", 4, num_workers=1, stream=io.StringIO())
        assert server.asked["/raw/0002.tar"] <= 1  # the fourth sample is in the second tar
    local = open_source(str(tmp_path / "raw"))
    assert prepare_cc12m(local, tmp_path / "local", 4, stream=io.StringIO()) == report
    assert tars_of(tmp_path / "set") == tars_of(tmp_path / "local") != {}
    assert not list(tmp_path.glob("set/**/*.raw*"))


def test_offline_the_hub_is_refused_in_one_line(tmp_path: Path) -> None:
    arguments = ["prepare", "download", "--hub", "example-org/some", "--output", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "fluxtrain.cli", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("fluxtrain: error: example-org/some: the Hub cannot be reached")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["some", "a/b/c", "/b", "a/"])
def test_a_name_that_the_hub_cannot_have_is_the_flags_fault(name: str) -> None:
    with pytest.raises(ConfigError, match="--hub"):
        open_hub(name)


def hub_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return what the Hub's API and its files look like for one public data set."""
    commit, name = "c" * 40, "example-org/some"
    siblings = [{"rfilename": path} for path in files]
    about = {"id": name, "sha": commit, "siblings": siblings, "private": False, "gated": False}
    tree = [
        {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }
        for path, content in files.items()
    ]
    answers = {f"datasets/{name}/resolve/{commit}/{path}": files[path] for path in files}
    for revision in ("main", commit):
        answers[f"api/datasets/{name}/revision/{revision}"] = json.dumps(about).encode()
        answers[f"api/datasets/{name}/tree/{revision}"] = json.dumps(tree).encode()
    return answers


def test_the_hubs_own_client_brings_a_data_set(tmp_path: Path) -> None:
    files = {"README.md": b"some", "some-0000.tar": raw_tar(range(2))}
    with serving(hub_files(files)) as server:
        server.answers = {path: [as_the_hub] for path in server.files}
        environment = {
            **os.environ,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }
        environment.pop("HF_HUB_OFFLINE", None)
        program = [sys.executable, "-m", "fluxtrain.cli", "prepare"]
        hub = ["download", "--hub", "example-org/some", "--include", "*.tar"]
        cc12m = ["cc12m", "--input", "hf://datasets/example-org/some", "--samples", "all"]
        for arguments, output in ((hub, "set"), (cc12m, "cleaned")):
            started = [*program, *arguments, "--output", str(tmp_path / output)]
            ended = subprocess.run(started, env=environment, capture_output=True, text=True)
            assert ended.returncode == 0, ended.stderr
    brought = tmp_path / "set" / "some-0000.tar"
    assert brought.read_bytes() == files["some-0000.tar"]
    assert not (tmp_path / "set" / "README.md").exists()
    assert list(tars_of(tmp_path / "cleaned")) == ["some-0000.tar"]
