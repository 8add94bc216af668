"""``--nodes`` and its companions: what is wrong or missing is told at once."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from tests.paths import EXAMPLES, MICRO

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_USAGE, ConfigError
from fluxtrain.launch import nodes
from fluxtrain.launch.nodes import Nodes, find_endpoint, interface_of, serves

HERE = "--rendezvous=127.0.0.1:29500"
NO_ENDPOINTS = (
    *("", "head", "head:", ":29500", "head:0", "head:65536", "head:x", "::1:29500", "[::1:29500"),
    *("[::1]", "[]:29500", "[head]:29500"),
)
V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 29500))
V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::7", 29500, 0, 0))


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_NODEID", raising=False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--nodes=2"], "--nodes: got '2'; needs --rendezvous=HOST:PORT"),
        ([HERE], "--rendezvous: got '127.0.0.1:29500'; needs --nodes=N"),
        (["--node-rank=0"], "--node-rank: got '0'; needs --nodes and --rendezvous"),
        (["--rendezvous-timeout=5"], "--rendezvous-timeout: got '5'; needs --nodes and"),
        *(
            ([HERE, f"--nodes={text}"], f"--nodes: got '{text}'; must be a number from 1 to 4096")
            for text in ("0", "-1", "4097", "two", "1.5", "3:2", "0:2", ":2", "2:", "1:2:3", "")
        ),
        *(
            (["--nodes=2", f"--rendezvous={text}"], f"--rendezvous: got '{text}'; must be HOST:PORT")
            for text in NO_ENDPOINTS
        ),
        *(
            (["--nodes=2", HERE, f"--node-rank={text}"], f"got '{text}'; must be from 0 to 1, as")
            for text in ("2", "-1", "x", "1.0", "")
        ),
        (["--nodes=1", HERE, "--node-rank=1"], "--node-rank: got '1'; must be 0"),
        *(
            (["--nodes=2", HERE, f"--rendezvous-timeout={text}"], "must be from 1 to 86400 seconds")
            for text in ("0", "x", "nan", "1e9", "")
        ),
        (["--nodes=2", "--rendezvous=no-such-host.invalid:29500"],
         "the address of 'no-such-host.invalid' is not found"),
        (["--nodes=2", "--rendezvous=192.0.2.1:29500", "--node-rank=0"],
         "192.0.2.1 must be an address of this node, which is node rank 0"),
    ],
)  # fmt: skip
def test_an_option_that_is_wrong_or_lacks_another_is_refused(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    assert main(["run", str(MICRO), f"--output={output}", *options]) == EXIT_USAGE
    assert error in capsys.readouterr().err
    assert not output.exists()


def test_a_task_of_one_node_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLES / "mlperf-from-raw" / "1-cc12m.yaml"
    assert main(["run", str(file), "--nodes=2", HERE]) == EXIT_USAGE
    assert "--nodes: the task prepare runs on one node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"SLURM_NODEID": "2"}, "$SLURM_NODEID: got '2'; must be from 0 to 1"),
        (
            {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
            "$SLURM_STEP_TASKS_PER_NODE: got '4'; one task per node: srun --ntasks-per-node=1",
        ),
    ],
)
def test_variables_of_slurm_are_checked_too(
    variables: dict[str, str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["run", str(MICRO), "--nodes=2", HERE]) == EXIT_USAGE
    assert error in capsys.readouterr().err


def test_slurm_s_rank_is_used_unless_one_is_given() -> None:
    from fluxtrain.cli.run import _rank

    slurm = {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    assert _rank(None, 3, slurm) == 1
    assert _rank("2", 3, slurm) == 2
    assert _rank(None, 3, {}) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_node_with_the_address_or_rank_0_serves(host: str) -> None:
    here, elsewhere = Nodes(2, 2, host, 29500), Nodes(2, 2, "192.0.2.1", 29500)
    endpoint = find_endpoint(here)
    assert endpoint.address == endpoint.own_address == host
    assert serves(here, endpoint)
    assert serves(Nodes(2, 2, host, 29500, rank=0), endpoint)
    assert not serves(Nodes(2, 2, host, 29500, rank=1), endpoint)
    found = find_endpoint(elsewhere)
    assert not serves(elsewhere, found)
    assert nodes._is_own(found.own_address)


def test_a_name_that_only_this_node_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's installer writes 127.0.1.1 beside the machine's name."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with pytest.raises(ConfigError, match=r"head is 127\.0\.1\.1 here, .* give its IP address"):
        find_endpoint(Nodes(2, 2, "head", 29500))
    assert find_endpoint(Nodes(1, 1, "head", 29500)).address == "127.0.1.1"


def test_a_name_with_both_kinds_of_address_has_its_ipv4_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nodes whose resolvers prefer one or the other would not meet."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [V6, V4])
    assert nodes._resolve(Nodes(2, 2, "head", 29500)) == "192.0.2.7"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [V6])
    assert nodes._resolve(Nodes(2, 2, "head", 29500)) == "2001:db8::7"


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "224.0.0.1", "::", "ff02::1"])
def test_an_address_of_no_node_is_refused(host: str) -> None:
    """Every node would take it for its own, and wait for the others."""
    shown = re.escape(f"[{host}]" if ":" in host else host)
    with pytest.raises(
        ConfigError, match=rf"--rendezvous: got '{shown}:29500'; .* no node's address"
    ):
        find_endpoint(Nodes(2, 2, host, 29500))


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("::1") == "lo"
    assert interface_of("2001:db8::1") is None
