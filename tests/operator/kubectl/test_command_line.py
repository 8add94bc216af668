"""Arguments and errors of the plugin: passed on to kubectl, or named in one line."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.paths import ROOT

from fluxtrain_operator.kubectl.client import error_of, printable
from fluxtrain_operator.kubectl.main import complete, main

ECHO = '#!/bin/sh\necho "$@" >> "$KUBECTL_LOG"\necho \'Error from server (NotFound): gone\' >&2\nexit 1\n'


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the arguments of each call of a kubectl that finds nothing."""
    program = tmp_path / "kubectl"
    program.write_text(ECHO)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("KUBECTL", raising=False)
    monkeypatch.setenv("KUBECTL_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--context=c", "-n", "team", "why", "a"],
        ["why", "--context", "c", "a", "--namespace=team"],
        ["why", "a", "--context", "c", "-nteam"],
        ["why", "ft/a", "--context=c", "--namespace", "team"],
    ],
)
def test_options_of_kubectl_are_passed_on_from_anywhere(
    arguments: list[str], log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    (call,) = log.read_text().splitlines()
    assert call.startswith("--context=c --namespace=team get fluxtrainings.fluxtrain.dev a ")
    assert "--request-timeout=20s" in call
    assert "no FluxTraining a in namespace team" in capsys.readouterr().err


def test_the_users_timeout_and_switches_are_kept(log: Path) -> None:
    arguments = ["why", "a", "--request-timeout=1m", "--insecure-skip-tls-verify", "--as=bob"]
    assert main([*arguments, "-n", "x"]) == 1
    (call,) = log.read_text().splitlines()
    assert call.startswith("--request-timeout=1m --insecure-skip-tls-verify --as=bob ")
    assert call.count("--request-timeout") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "COMMAND"),
        ([], "usage: kubectl fluxtrain why|timeline|stacks|goodput|logs [NAME]"),
        (["whence", "a"], "'whence'"),
        (["why"], "why needs the NAME"),
        (["why", "a", "b"], "b"),
        (["why", "pod/a"], "'pod/a'; must be the name of a FluxTraining"),
        (["why", "ft/"], "must be the name"),
        (["why", "--", "-n"], "'-n'; must be the name"),
        (["stacks", "a,b"], "'a,b'; must be the name"),
        (["logs", "ft/A b"], "'ft/A b'; must be the name"),
        (["why", "a", "--mlperf"], "--mlperf is an option of logs"),
        (["goodput", "a", "-A"], "--all-namespaces is an option of goodput without a NAME"),
        (["timeline", "a", "--all-namespaces"], "--all-namespaces is an option of goodput"),
        (["why", "a", "--contxt=c"], "--contxt=c"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_requested(
    arguments: list[str], says: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert says in capsys.readouterr().err
    assert not log.exists()


def test_kubectl_itself_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECTL", "/nowhere/kubectl")
    assert main(["why", "a"]) == 2
    assert "/nowhere/kubectl is not on the PATH" in capsys.readouterr().err


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\nü\x07") == "a\\x1b[2Jb\\r\nü\\x07"


JOBS = """#!/bin/sh
echo "$@" >> "$KUBECTL_LOG"
echo 'team alpha {}'
echo 'team beta {}'
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ([""], ["why\t", "timeline\t", "stacks\t", "goodput\t", "logs\t"]),
        (["-n", "team", "ti"], ["timeline\t"]),
        (["why", ""], ["alpha", "beta"]),
        (["-n", "team", "logs", "--mlperf", "al"], ["alpha"]),
        (["logs", "-n", "team", "al"], ["alpha"]),
        (["logs", "--ml"], ["--mlperf"]),
        (["why", "alpha", ""], []),
        (["why", "-n", "te"], []),
    ],
)
def test_kubectl_completes_commands_names_and_options(
    words: list[str], lines: list[str], log: Path
) -> None:
    (log.parent / "kubectl").write_text(JOBS)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["kubectl_complete-fluxtrain"].partition(":")
    code = f"import sys; from {module} import {function} as entry; sys.exit(entry())"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *found, directive = done.stdout.splitlines()
    assert directive == ":4", "no files"
    assert len(found) == len(lines)
    assert all(a.startswith(b) for a, b in zip(found, lines, strict=True))
    if "-n" in words and log.exists():
        assert log.read_text().startswith("--namespace=team get fluxtraining")


def test_an_unreachable_cluster_completes_nothing(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complete(["why", ""]) == 0
    assert capsys.readouterr() == (":4\n", "")


KLOG = 'E1122 11:57:06.9 15856 memcache.go:265] "Unhandled Error" err="dial tcp: refused"\n'
REFUSED = "was refused - did you specify the right host or port?"
FORBIDDEN = (
    'Error from server (Forbidden): fluxtrainings.fluxtrain.dev "a" is forbidden: User "bob" cannot get '
    'resource "fluxtrainings" in API group "fluxtrain.dev" in the namespace "team"'
)
EXEC = (
    'Error from server (Forbidden): pods "a-0" is forbidden: User "bob" cannot create resource "pods/exec" '
    'in API group "" in the namespace "team"'
)
MESSAGES = {
    "no_kubeconfig": (
        f"{KLOG}The connection to the server localhost:8080 {REFUSED}",
        2,
        "no API server: kubectl has no kubeconfig",
    ),
    "refused": (
        f"{KLOG}{KLOG}The connection to the server 192.0.2.1 {REFUSED}",
        1,
        "the API server cannot be reached: The connection to the server 192.0.2.1 was refused",
    ),
    "no_such_host": (
        f"{KLOG}Unable to connect to the server: dial tcp: lookup a.invalid: no such host",
        1,
        "cannot be reached: Unable to connect to the server: dial tcp: lookup a.invalid",
    ),
    "timeout": ("error: context deadline exceeded", 1, "cannot be reached"),
    "missing_file": ("error: stat /nope: no such file or directory", 2, "kubeconfig: stat /nope"),
    "broken_file": (
        'error: error loading config file "/bad": yaml: line 1',
        2,
        'kubeconfig: error loading config file "/bad"',
    ),
    "context": (
        "Error in configuration: context was not found for specified context: zz",
        2,
        "context: zz",
    ),
    "context_of_a_command": (
        'error: context "zz" does not exist',
        2,
        'context "zz" does not exist',
    ),
    "user": ('error: auth info "zz" does not exist', 2, 'auth info "zz" does not exist'),
    "cluster": ('error: no server found for cluster "zz"', 2, "kubeconfig: no server found"),
    "credentials": (
        "error: You must be logged in to the server (Unauthorized)",
        1,
        "does not accept the credentials",
    ),
    "token": (
        "error: You must be logged in to the server (the server has asked for the client to provide "
        "credentials)",
        1,
        "does not accept the credentials",
    ),
    "forbidden": (
        FORBIDDEN,
        1,
        "user bob lacks the right to get fluxtrainings.fluxtrain.dev in namespace team",
    ),
    "forbidden_exec": (EXEC, 1, "user bob lacks the right to create pods/exec in namespace team"),
    "forbidden_in_the_cluster": (
        'Error from server (Forbidden): x: User "b" cannot list resource "nodes" in API group "" at the '
        "cluster scope",
        1,
        "user b lacks the right to list nodes; ask",
    ),
    "no_definition": (
        'error: the server doesn\'t have a resource type "fluxtrainings"',
        1,
        "install the operator's chart",
    ),
    "no_kueue": (
        'error: the server doesn\'t have a resource type "workloads"',
        1,
        "does not serve workloads",
    ),
    "not_found": ('Error from server (NotFound): pods "a" not found', 1, 'pods "a" not found'),
    "option": (
        "error: Invalid timeout value. Timeout must be a single integer in seconds",
        2,
        "Invalid timeout value",
    ),
    "unknown": ("error: something new", 1, "something new"),
    "warning": ("Warning: v1 is deprecated\nerror: something new", 1, "something new"),
    "nothing": ("", 1, "kubectl failed without a message"),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_becomes_one_line_with_the_exit_code(message: str) -> None:
    stderr, exit_code, text = MESSAGES[message]
    error = error_of(stderr)
    assert text in str(error)
    assert error.exit_code == exit_code
    assert "\n" not in str(error)
    assert "memcache" not in str(error)


def test_only_absent_objects_are_not_found() -> None:
    found = {name: error_of(stderr).not_found for name, (stderr, _, _) in MESSAGES.items()}
    assert {name for name, not_found in found.items() if not_found} == {"not_found", "no_kueue"}
