"""Downloads from a faulty server end with the right bytes or a clear error."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.prepare.cli_process import is_killed_after, require_success
from tests.trainer.prepare.faulty_server import (
    Respond,
    Server,
    closed_connection,
    correct,
    forbidden,
    like_the_hub,
    no_response,
    not_http,
    redirect,
    serving,
    slow,
    stalled,
    too_many_bytes,
    trickling,
    truncated,
    truncated_without_length,
    unavailable,
    without_ranges,
    wrong_bytes,
    wrong_range,
)
from tests.trainer.prepare.raw_sets.raw_cc12m import parts, photo, saved, tars_in, write_tar

from fluxtrain.cli import main
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.fetch.http import DownloadError, HttpClient
from fluxtrain.prepare.cc12m import prepare_cc12m
from fluxtrain.prepare.download import (
    _require_no_downgrade,
    download,
    open_hub,
    open_source,
    parse,
    path_fault,
    read_manifest,
)

pytestmark = pytest.mark.slow

FILES = {f"part/file-{i}.bin": random.Random(i).randbytes(200_000 + i) for i in range(3)}
FILES["empty.bin"] = b""
CLIENT = HttpClient(timeout=10, attempts=3, backoff=0.01)
IMPATIENT_CLIENT = HttpClient(timeout=0.5, attempts=3, backoff=0.01, min_rate=1000)


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
    options: dict[str, Any] = {"client": CLIENT, "connections": 4, **more}
    stream = io.StringIO()
    return download(f"{server.url}/metadata/some.uri", output, stream=stream, **options)


def content_of(output: Path) -> dict[str, bytes]:
    files = [path for path in output.rglob("*") if path.is_file() and path.name != ".verified"]
    return {str(path.relative_to(output)): path.read_bytes() for path in files}


def test_files_of_a_manifest_are_downloaded_once(server: Server, tmp_path: Path) -> None:
    assert fetch(server, tmp_path / "set") == 4
    assert content_of(tmp_path / "set") == FILES
    assert fetch(server, tmp_path / "set") == 0
    assert all(server.num_requests[f"/sets/{name}"] == 1 for name in FILES)


ONCE = [
    truncated,
    stalled,
    no_response,
    trickling,
    closed_connection,
    unavailable,
    not_http,
    wrong_bytes,
    truncated_without_length,
]


@pytest.mark.parametrize("fault", [*ONCE, too_many_bytes], ids=lambda fault: fault.__name__)
def test_a_single_failure_is_retried(server: Server, tmp_path: Path, fault: Respond) -> None:
    server.responses["/sets/part/file-1.bin"] = [fault, correct]
    fetch(server, tmp_path / "set", client=IMPATIENT_CLIENT)
    assert content_of(tmp_path / "set") == FILES


@pytest.mark.parametrize("fault", [*ONCE, forbidden], ids=lambda fault: fault.__name__)
def test_a_permanent_failure_is_an_error_and_other_files_are_downloaded(
    server: Server, tmp_path: Path, fault: Respond
) -> None:
    server.responses["/sets/part/file-1.bin"] = [fault]
    with pytest.raises(
        DownloadError, match=r"1 of 4 files could not be downloaded(.|\n)*file-1\.bin"
    ):
        fetch(server, tmp_path / "set", client=IMPATIENT_CLIENT)
    assert server.num_requests["/sets/part/file-1.bin"] <= 3
    others = {name: content for name, content in FILES.items() if "1" not in name}
    downloaded = content_of(tmp_path / "set")
    complete = {name: content for name, content in downloaded.items() if "partial" not in name}
    assert complete == others
    server.responses.clear()
    assert fetch(server, tmp_path / "set") == 1
    assert content_of(tmp_path / "set") == FILES


def test_a_truncated_download_resumes(server: Server, tmp_path: Path) -> None:
    server.responses["/sets/part/file-2.bin"] = [truncated, correct]
    fetch(server, tmp_path / "set")
    assert [range_ for range_ in server.ranges if range_] == ["bytes=100001-"]


@pytest.mark.parametrize("rest", [without_ranges, wrong_range], ids=lambda rest: rest.__name__)
def test_a_server_that_cannot_resume_sends_the_whole_file(
    server: Server, tmp_path: Path, rest: Respond
) -> None:
    server.responses["/sets/part/file-2.bin"] = [truncated, rest, correct]
    fetch(server, tmp_path / "set")
    assert content_of(tmp_path / "set") == FILES


@pytest.mark.parametrize("left", [b"", b"other", FILES["part/file-0.bin"], b"x" * 300_000])
def test_files_left_by_earlier_runs_do_no_harm(server: Server, tmp_path: Path, left: bytes) -> None:
    (tmp_path / "set" / "part").mkdir(parents=True)
    (tmp_path / "set" / "part" / "file-0.bin.partial").write_bytes(left)
    (tmp_path / "set" / "part" / "file-1.bin").write_bytes(left)
    fetch(server, tmp_path / "set")
    assert content_of(tmp_path / "set") == FILES
    assert server.num_requests["/sets/part/file-0.bin"] == (
        0 if left == FILES["part/file-0.bin"] else 2 if left else 1
    )


def test_links_in_the_output_lead_to_no_file_outside_of_it(server: Server, tmp_path: Path) -> None:
    outside, output = tmp_path / "outside", tmp_path / "set"
    outside.mkdir()
    (outside / "mine").write_bytes(b"mine")
    (output / "part").mkdir(parents=True)
    for name in ("file-0.bin.partial", "file-1.bin"):
        (output / "part" / name).symlink_to(outside / "mine")
    fetch(server, output)
    assert content_of(output) == FILES
    other = tmp_path / "other"
    other.mkdir()
    (other / "part").symlink_to(outside)
    with pytest.raises(DownloadError, match=r"3 of 4 files(.|\n)*part: leads out of .* by a link"):
        fetch(server, other)
    assert content_of(outside) == {"mine": b"mine"}


def test_a_file_that_changed_is_downloaded_again(server: Server, tmp_path: Path) -> None:
    fetch(server, tmp_path / "set")
    changed = tmp_path / "set" / "part" / "file-0.bin"
    changed.write_bytes(b"changed")
    assert fetch(server, tmp_path / "set") == 1
    status = changed.stat()
    changed.write_bytes(b"y" * len(FILES["part/file-0.bin"]))
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))  # like a faulty disk
    assert fetch(server, tmp_path / "set") == 0
    assert fetch(server, tmp_path / "set", verify=True) == 4
    assert content_of(tmp_path / "set") == FILES


def test_redirects_are_followed_to_http_only(server: Server, tmp_path: Path) -> None:
    path = "/sets/part/file-0.bin"
    server.files["/elsewhere"] = FILES["part/file-0.bin"]
    server.responses[path] = [redirect(f"{server.url}/elsewhere")]
    fetch(server, tmp_path / "set")
    assert content_of(tmp_path / "set") == FILES
    for index, to in enumerate(["file:///etc/passwd", "ftp://127.0.0.1/x", f"{server.url}{path}"]):
        server.responses[path] = [redirect(to)]
        with pytest.raises(DownloadError, match=r"file-0\.bin"):
            fetch(server, tmp_path / f"other{index}")
    assert server.num_requests[path] < 60  # a redirect loop ends after a few rounds


def test_an_https_manifest_must_not_lead_to_http(tmp_path: Path) -> None:
    (tmp_path / "some.uri").write_text("http://example.org/sets")
    (tmp_path / "some.md5").write_bytes(md5_list(FILES))
    assert len(read_manifest(str(tmp_path / "some.uri"), None, CLIENT)) == 4
    with pytest.raises(DataError, match="came over https"):
        _require_no_downgrade("https://example.org/some.md5", "http://example.org/sets")


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a\\b", "", "..", "."),
        *("a\x00b", "a\nb", "x" * 1025, ".verified", "a.partial", "a.partial/x"),
    ],
)
def test_a_path_outside_the_output_is_refused(path: str) -> None:
    assert path_fault(path)


MD5 = hashlib.md5(b"").hexdigest()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"{MD5}  ../../x", "leads out"),
        (f"{MD5}  a\n{MD5} *a", "listed twice"),
        (f"{MD5}  a\n{MD5}  a/b", "both a file and a folder"),
        ("d41d8cd98f  a", "line 1"),
        ("<html>not found</html>", "not an MD5 and a path"),
        ("\n\n", "lists no files"),
    ],
)
def test_a_malformed_manifest_is_named_with_its_line(text: str, fault: str) -> None:
    with pytest.raises(DataError, match=rf"some\.md5:(.|\n)*{fault}"):
        parse("some.md5", text, "http://example.org")


def test_anything_but_a_manifest_is_an_error_of_the_flag(tmp_path: Path) -> None:
    for given in ("nowhere.md5", "set.json", ""):
        with pytest.raises(ConfigError, match="--manifest"):
            read_manifest(given, None, CLIENT)
    (tmp_path / "a.uri").write_text("file:///etc")
    with pytest.raises(DataError, match="not one URL"):
        read_manifest(str(tmp_path / "a.uri"), None, CLIENT)


def test_a_mounted_volume_is_read_like_a_server(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / "volume" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "volume" / name).write_bytes(content)
    (tmp_path / "volume" / "some.md5").write_bytes(md5_list(FILES))
    manifest = str(tmp_path / "volume" / "some.md5")
    assert download(manifest, tmp_path / "set", client=CLIENT, stream=io.StringIO()) == 4
    assert content_of(tmp_path / "set") == FILES
    (tmp_path / "volume" / "empty.bin").unlink()
    with pytest.raises(DownloadError, match=r"empty\.bin: No such file"):
        download(manifest, tmp_path / "other", client=CLIENT, stream=io.StringIO())


@pytest.mark.slow
def test_a_download_killed_at_random_times_resumes(server: Server, tmp_path: Path) -> None:
    server.responses = {f"/sets/{name}": [slow] for name in FILES if FILES[name]}
    arguments = ["prepare", "download", "--connections", 2, "--output", tmp_path / "set"]
    arguments += ["--manifest", f"{server.url}/metadata/some.uri"]
    rng = random.Random(0)
    kills = sum(is_killed_after(rng.uniform(0.3, 0.7), *arguments) for _ in range(6))
    require_success(*arguments)
    print(f"\nkilled {kills} times")
    assert content_of(tmp_path / "set") == FILES


def raw_tar(path: Path, numbers: range) -> bytes:
    images = {f"{n:09d}": parts(saved(photo(260 + n, 300, seed=n))) for n in numbers}
    write_tar(path, list(images.items()))
    return path.read_bytes()


def test_raw_tars_from_a_server_are_cleaned_and_removed(tmp_path: Path) -> None:
    names = [f"raw/{i:04d}.tar" for i in range(3)]
    raw = {name: raw_tar(tmp_path / name, range(3 * i, 3 * i + 3)) for i, name in enumerate(names)}
    with serving({**raw, "some.md5": md5_list(raw)}) as server:
        server.responses["/raw/0001.tar"] = [truncated, correct]
        source = open_source(f"{server.url}/some.md5", CLIENT)
        report = prepare_cc12m(source, tmp_path / "set", 4, num_workers=1, stream=io.StringIO())
        assert server.num_requests["/raw/0002.tar"] <= 1  # the fourth sample is in the second tar
    local = open_source(str(tmp_path / "raw"))
    assert prepare_cc12m(local, tmp_path / "local", 4, stream=io.StringIO()) == report
    assert tars_in(tmp_path / "set") == tars_in(tmp_path / "local") != {}
    assert not list(tmp_path.glob("set/**/*.raw*"))


@pytest.mark.parametrize(
    ("constant", "value"), [("HF_HUB_OFFLINE", True), ("ENDPOINT", "http://127.0.0.1:1")]
)
def test_without_the_hub_the_error_has_one_line(
    constant: str,
    value: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(f"huggingface_hub.constants.{constant}", value)
    hub = ["--hub", "example-org/some", "--output", str(tmp_path)]
    assert main(["prepare", "download", *hub]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("fluxtrain: error: example-org/some: the Hub cannot be reached")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("name", ["some", "a/b/c", "/b", "a/"])
def test_an_impossible_name_on_the_hub_is_an_error_of_the_flag(name: str) -> None:
    with pytest.raises(ConfigError, match="--hub"):
        open_hub(name)


def hub_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the API responses and the files of a public data set, by path."""
    commit, name = "c" * 40, "example-org/some"
    siblings = [{"rfilename": path} for path in files]
    info = {"id": name, "sha": commit, "siblings": siblings, "private": False, "gated": False}
    tree = [
        {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }
        for path, content in files.items()
    ]
    paths = {f"datasets/{name}/resolve/{commit}/{path}": files[path] for path in files}
    for revision in ("main", commit):
        paths[f"api/datasets/{name}/revision/{revision}"] = json.dumps(info).encode()
        paths[f"api/datasets/{name}/tree/{revision}"] = json.dumps(tree).encode()
    return paths


def test_a_data_set_is_downloaded_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    files = {"README.md": b"some", "some-0000.tar": raw_tar(tmp_path / "raw.tar", range(2))}
    with serving(hub_files(files)) as server:
        server.responses = {path: [like_the_hub] for path in server.files}
        environment = {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }
        hub = ["download", "--hub", "example-org/some", "--include", "*.tar"]
        cc12m = ["cc12m", "--input", "hf://datasets/example-org/some", "--samples", "all"]
        for arguments, output in ((hub, "set"), (cc12m, "cleaned")):
            require_success("prepare", *arguments, "--output", tmp_path / output, **environment)
    downloaded = tmp_path / "set" / "some-0000.tar"
    assert downloaded.read_bytes() == files["some-0000.tar"]
    assert not (tmp_path / "set" / "README.md").exists()
    assert list(tars_in(tmp_path / "cleaned")) == ["some-0000.tar"]
