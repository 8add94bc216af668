"""All commands of ``fluxtrain``: their help, their parsers, and the call of the one that is asked for.

Only the module of that command is imported: help takes no second.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from importlib import import_module
from typing import Any

from fluxtrain import __version__
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError

_GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "train": {
        "init": (
            "run.add_init",
            "write the first file of a LoRA for a folder of pictures and a GPU",
        ),
        "plan": ("run.add_plan", "estimate memory, FLOPs, time and disk space"),
        "run": ("run.add", "train from a FluxTraining file"),
        "from-env": (
            "import_config.add_from_env",
            "fetch, train and resume by the variables of kohya's container for MI300X",
        ),
    },
    "prepare": {
        "fetch": (
            "prepare.add_fetch",
            "fetch the weights, encoders and pictures that a file needs",
        ),
        "prepare": ("prepare.add", "download or prepare a data set"),
        "data": ("data.add_data", "look at pictures to train on"),
        "convert": ("data.add_convert", "convert encoded samples to another layout"),
        "import": ("weights.add_import", "convert published weights for training"),
        "import-config": (
            "import_config.add",
            "write a FluxTraining for another trainer's options",
        ),
    },
    "inspect and publish": {
        "sample": ("sample.add", "generate images of prompts"),
        "gallery": ("sample.add_gallery", "write a page of runs side by side"),
        "export": ("weights.add_export", "write a run's weights in a published layout"),
        "adapter": ("weights.add", "convert, merge, extract, describe or resize LoRA files"),
        "push": ("weights.add_push", "publish a run's LoRA at the Hub"),
        "doctor": ("pods.add_doctor", "print what this node has, what is set and what is missing"),
        "mlperf": ("mlperf.add_mlperf", "check an MLPerf log or create a submission"),
    },
    "in pods": {
        "fetch-models": ("pods.add_fetch_models", "fetch what the run of this pod misses"),
        "agent": ("pods.add_agent", "train on one node of a cluster"),
        "rendezvous": ("pods.add_rendezvous", "serve the rendezvous of a job's agents"),
        "stacks": ("pods.add_stacks", "print the stacks of this container's ranks into its log"),
    },
}
"""By heading: the function that adds arguments and the action to the parser, and what the command does."""
COMMANDS = {name: row for group in _GROUPS.values() for name, row in group.items()} | {
    "completion": ("commands.add_completion", "print the completion of a shell")
}
_OTHER_WORDS = {"train": "run", "check": "data check", "generate": "sample", "lora": "init"}


def run_command(arguments: list[str] | None) -> int:
    """Run the command in ``arguments`` (default: sys.argv) and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    first = words[0] if words else ""
    if first in ("", "-h", "--help", "help"):
        print(help_text())
        return EXIT_OK if words else EXIT_USAGE
    if first in ("--version", "version"):
        print(__version__)
        return EXIT_OK
    if first not in COMMANDS:
        near = difflib.get_close_matches(first, COMMANDS, n=1)
        meant = _OTHER_WORDS.get(first) or (near[0] if near else "")
        meant = f"run {first}" if first.endswith((".yaml", ".yml")) else meant
        hint = f"did you mean {meant}?" if meant else "see fluxtrain --help"
        raise ConfigError("COMMAND", first, f"there is none of this name; {hint}")
    parser = make_parser(first)
    parsed, rest = parser.parse_known_args(words)
    if isinstance(getattr(parsed, "paths", None), list) and not _options(rest):
        from fluxtrain.cli.arguments import path

        parsed.paths += map(path, rest)  # those after an option: argparse stops at the first
        rest = []
    if rest and not parsed.takes_overrides:
        if _options(rest):
            text = f"no such option{_meant(parser, first, rest[0])}"
        else:
            names = [name for dest, name in vars(parsed).items() if dest.endswith("command")]
            text = f"is one too many; see fluxtrain {' '.join(names)} --help"
        raise ConfigError("arguments", " ".join(rest), text)
    parsed.overrides = rest
    return int(parsed.action(parsed))


def _meant(parser: argparse.ArgumentParser, command: str, given: str) -> str:
    from fluxtrain.contract.model_base import meant_fields, near_miss
    from fluxtrain.contract.run.config import RunConfig

    name = given.partition("=")[0]
    name = name if name.startswith("--") else f"-{name}"
    choices: Any = parser._subparsers and parser._subparsers._group_actions[0].choices
    options = choices[command]._option_string_actions
    if begun := [each for each in options if each.startswith(name)]:
        return f"; did you mean {begun[0]}?"
    if command == "init" and name == "--name":
        return "; set metadata.name in the file that init writes"
    if command == "init" and (fields := meant_fields(name[2:], RunConfig)):
        field = fields[0].replace("schedule.steps", "schedule.epochs")  # which the file has
        return f"; set spec.run.{field} in the file that init writes"
    return near_miss(name, options)


def _options(texts: list[str]) -> list[str]:
    return [text for text in texts if text.startswith("-")]


def help_text() -> str:
    """Return what ``fluxtrain --help`` prints."""
    lines = ["usage: fluxtrain COMMAND ...", "", "Train FLUX.1 from one FluxTraining file."]
    *groups, (_, in_pods) = _GROUPS.items()
    width = max(map(len, COMMANDS))
    for title, group in groups:
        lines += ["", f"{title}:"]
        lines += [f"  {name:{width}}  {help}" for name, (_, help) in group.items()]
    lines += ["", "fluxtrain COMMAND --help has a command's options; --version prints the version."]
    lines += [
        "fluxtrain completion bash|zsh|tcsh prints what completes commands, options and fields."
    ]
    return "\n".join([*lines, f"Pods of a job run {', '.join(in_pods)}."])


def make_parser(only: str = "") -> argparse.ArgumentParser:
    """Return the parser of the command ``only``, or of all."""
    from fluxtrain.cli.arguments import Parser, sentence

    parser = Parser(prog="fluxtrain", allow_abbrev=False, description="Train FLUX.1.")
    parser.set_defaults(takes_overrides=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in [only] if only else COMMANDS:
        place, help = COMMANDS[name]
        module, _, function = place.partition(".")
        added = commands.add_parser(name, allow_abbrev=False, help=help, description=sentence(help))
        getattr(import_module(f"fluxtrain.cli.{module}"), function)(added)
    return parser


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=_print_completion)
    parser.description = (
        "Print a script that completes commands, options, fields and files, for: eval or a file."
    )
    parser.add_argument(
        "shell", choices=("bash", "zsh", "tcsh"), metavar="SHELL", help="bash, zsh or tcsh"
    )


def _print_completion(arguments: argparse.Namespace) -> int:
    import shtab

    parser = make_parser()
    _prepare_completion(parser, shtab.FILE)
    print(shtab.complete(parser, shell=arguments.shell))
    return EXIT_OK


def _prepare_completion(parser: argparse.ArgumentParser, files: Any) -> None:
    """Let arguments that are paths be completed as ``files``, and the fields of spec.run as options."""
    from fluxtrain.cli.arguments import path
    from fluxtrain.contract.model_base import iter_fields
    from fluxtrain.contract.run.config import RunConfig

    for action in list(parser._actions):
        if action.type is path:
            action.complete = files  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _prepare_completion(each, files)
    if parser.get_default("takes_overrides") and parser.get_default("action"):
        for field in iter_fields(RunConfig):
            if "[]" not in field.path and f"--{field.path}" not in parser._option_string_actions:
                parser.add_argument(f"--{field.path}")
