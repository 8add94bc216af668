"""The command line of the plugin: ``kubectl fluxtrain COMMAND [NAME]``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress

from fluxtrain import __version__
from fluxtrain.errors import EXIT_ERROR, EXIT_OK
from fluxtrain_operator.kubectl.client import Kubectl, KubectlError, printable
from fluxtrain_operator.kubectl.logs import logs, stacks
from fluxtrain_operator.kubectl.timeline import goodput, timeline
from fluxtrain_operator.kubectl.why import why

_PROG = "kubectl fluxtrain"
_COMMANDS = {
    "why": "what a job does or waits for, and what to do about it",
    "timeline": "events, transitions and restarts of a job, in the order of time",
    "stacks": "where all ranks of a job are; needs the right to create pods/exec",
    "goodput": "productive and lost time of a job, or of all jobs",
    "logs": "the log of rank 0; --mlperf: the whole MLPerf log",
}
_CONNECTION = (
    *("kubeconfig", "context", "cluster", "user", "namespace", "server", "token", "as", "as-group"),
    *("as-uid", "certificate-authority", "client-certificate", "client-key", "tls-server-name"),
    *("request-timeout", "cache-dir"),
)
"""kubectl's own options with a value; they are passed on as they are."""
_SHORT = {"namespace": "-n", "server": "-s"}
_NAME = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""Of a FluxTraining; kubectl would take others for options, or for several."""
_NAME_PREFIXES = ("ft/", "fluxtraining/", "fluxtrainings/", "fluxtrainings.fluxtrain.dev/")


class _PassOn(argparse.Action):
    """Collects an option of kubectl, in the order of the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        flag = self.option_strings[-1]
        namespace.options.append(f"{flag}={values}" if isinstance(values, str) else flag)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments`` (default: sys.argv) and return its exit code."""
    parser = _parser()
    parsed = parser.parse_intermixed_args(arguments)
    _check(parser, parsed)
    try:
        return _run(parsed, Kubectl(tuple(parsed.options)))
    except KubectlError as error:
        _report(f"error: {error}")
        return error.exit_code


def _run(parsed: argparse.Namespace, kubectl: Kubectl) -> int:
    if parsed.command == "logs":
        text, note = logs(kubectl, parsed.name, parsed.mlperf)
        _report(note)
        sys.stdout.write(text)
        sys.stdout.flush()
        return EXIT_OK
    problems: list[str] = []
    if parsed.command == "stacks":
        text, problems = stacks(kubectl, parsed.name)
    elif parsed.command == "goodput":
        text = goodput(kubectl, parsed.name, parsed.all_namespaces)
    else:
        text = {"why": why, "timeline": timeline}[parsed.command](kubectl, parsed.name)
    print(printable(text), flush=True)
    for problem in problems:
        _report(problem)
    return EXIT_ERROR if problems else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _COMMANDS))
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} {'|'.join(_COMMANDS)} [NAME] [options]",
        allow_abbrev=False,
        description="Tell what FluxTrainings do, with the user's kubectl and its options.",
        epilog="\n".join(["commands:", *(f"  {n:{width}}  {t}" for n, t in _COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(options=[])
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=list(_COMMANDS), metavar="COMMAND")
    parser.add_argument(
        "name", nargs="?", type=_name, metavar="NAME", help="name of a FluxTraining"
    )
    parser.add_argument("--mlperf", action="store_true", help="logs: only the MLPerf log")
    text = "goodput: the jobs of all namespaces"
    parser.add_argument("-A", "--all-namespaces", action="store_true", help=text)
    options = parser.add_argument_group("options of kubectl, which are passed on")
    for name in _CONNECTION:
        flags = [*([_SHORT[name]] if name in _SHORT else []), f"--{name}"]
        options.add_argument(*flags, action=_PassOn, metavar="VALUE")
    options.add_argument("--insecure-skip-tls-verify", action=_PassOn, nargs=0)
    return parser


def _check(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Report arguments that do not fit the command; exits with 2."""
    if parsed.name is None and parsed.command != "goodput":
        parser.error(f"{parsed.command} needs the NAME of a FluxTraining")
    if parsed.mlperf and parsed.command != "logs":
        parser.error("--mlperf is an option of logs")
    if parsed.all_namespaces and (parsed.command != "goodput" or parsed.name is not None):
        parser.error("--all-namespaces is an option of goodput without a NAME")


def _name(text: str) -> str:
    """Return the name in ``text``, which may have the resource before it, as kubectl prints it."""
    prefix = next((prefix for prefix in _NAME_PREFIXES if text.startswith(prefix)), "")
    name = text.removeprefix(prefix)
    if not _NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"got {text!r}; must be the name of a FluxTraining")
    return name


def complete(arguments: Sequence[str] | None = None) -> int:
    """Print what may be the last of ``arguments``, and ``:4``, which tells kubectl not to add files."""
    *before, last = (sys.argv[1:] if arguments is None else arguments) or [""]
    long = {short: f"--{name}" for name, short in _SHORT.items()}
    given: list[str] = []
    options: list[str] = []
    is_value = False  # of the option before
    for word in before:
        flag = long.get(word, word)
        if is_value:
            options[-1] += f"={word}"
        elif flag.removeprefix("--").partition("=")[0] in _CONNECTION:
            options.append(flag)
        elif not word.startswith("-"):
            given.append(word)
        is_value = not is_value and flag.removeprefix("--") in _CONNECTION
    found: list[str] = []
    if last.startswith("-"):
        found = [option for action in _parser()._actions for option in action.option_strings]
    elif not given and not is_value:
        found = [f"{name}\t{text}" for name, text in _COMMANDS.items()]
    elif len(given) == 1 and not is_value:
        with suppress(KubectlError):
            jobs = Kubectl(tuple(options)).statuses()
            found = [job["metadata"]["name"] for job in jobs]
    print("\n".join([*(each for each in found if each.startswith(last)), ":4"]))
    return EXIT_OK


def _report(text: str) -> None:
    print(f"{_PROG}: {printable(text)}", file=sys.stderr, flush=True)
