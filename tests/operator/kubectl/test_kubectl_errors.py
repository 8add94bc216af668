"""kubectl's messages, as kubectl 1.34 writes them, become one line with the exit code."""

from __future__ import annotations

import pytest

from fluxtrain_operator.kubectl.client import error_of

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
