"""``fluxtrain rendezvous``: the ends of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_STORAGE
from fluxtrain.rendezvous import service
from fluxtrain.rendezvous.membership import Limits

A, B, C = "a" * 12, "b" * 12, "c" * 12


@pytest.mark.parametrize("seconds", ["1", "6.5", "3600"])
@pytest.mark.parametrize("nodes", ["1:1", "1:4096", "7:7"])
@pytest.mark.parametrize("port", ["0", "65535"])
def test_options_within_their_bounds_reach_the_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: str, nodes: str, seconds: str
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(service, "run", lambda *arguments: calls.append(arguments))
    options = [f"--port={port}", f"--members-port={port}", f"--lost-seconds={seconds}"]
    assert main(["rendezvous", f"--nodes={nodes}", f"--key={tmp_path}", *options]) == 0
    low, high = map(int, nodes.split(":"))
    limits = Limits(low, high, lost_seconds=float(seconds))
    assert calls == [(int(port), int(port), limits, tmp_path, (0, 0), {})]


@pytest.mark.parametrize(
    ("option", "ended", "places"),
    [
        ("--ended=", (0, 0), {}),
        ("--ended=1:3", (1, 3), {}),
        ("--ended=2147483647:0", (2**31 - 1, 0), {}),
        ("--places=", (0, 0), {}),
        (f"--places={A},{B};{C}", (0, 0), {A: 0, B: 0, C: 1}),
    ],
)
def test_the_generation_that_must_end_and_the_places_of_nodes_reach_the_service(
    monkeypatch: pytest.MonkeyPatch, option: str, ended: tuple[int, int], places: dict[str, int]
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(service, "run", lambda *arguments: calls.append(arguments))
    assert main(["rendezvous", "--nodes=1:2", "--key=key", option]) == 0
    assert calls[0][-2:] == (ended, places)


@pytest.mark.parametrize(
    "option",
    [
        *(
            f"--nodes={text}"
            for text in ("", "1", "0:1", "2:1", "1:", ":1", "-1:2", "a:b", "1:2:3")
        ),
        *(f"--lost-seconds={text}" for text in ("", "0", "0.9", "-1", "3600.1", "nan", "inf", "x")),
        *(f"--ended={text}" for text in ("1", "1:", ":1", "a:b", "-1:2", "1:2:3", "1:2147483648")),
        *(f"--places={text}" for text in ("rack", A[1:], f"{A},", f"{A};;{B}")),
        *(f"--port={text}" for text in ("", "-1", "65536", "1.5", "x")),
        *(f"--members-port={text}" for text in ("-1", "65536")),
        "--key=",
    ],
)
def test_options_beyond_their_bounds_are_refused(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["rendezvous", "--nodes=1:2", "--key=key", option])
    assert error.value.code == 2
    assert f"error: {option.partition('=')[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(("content", "text"), [(b"", "is empty"), (None, "cannot be read")])
def test_a_key_that_is_empty_or_absent_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, text: str
) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_bytes(content)
    options = ["--nodes=1:1", "--port=0", "--members-port=0", f"--key={key}"]
    assert main(["rendezvous", *options]) == EXIT_STORAGE
    assert f"--key {key}: {text}" in capsys.readouterr().err
