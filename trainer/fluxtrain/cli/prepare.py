"""``fluxtrain prepare``: download and prepare data sets."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import wraps

from fluxtrain.cli.arguments import add_paths, path, reject_unknown
from fluxtrain.errors import EXIT_OK, StoppedError

Action = Callable[[argparse.Namespace, list[str]], int]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "prepare", allow_abbrev=False, help="download or prepare a data set", description=__doc__
    )
    sets = parser.add_subparsers(dest="what", required=True, metavar="SET")
    _add_openmoji(sets)
    _add_cc12m(sets)
    _add_coco(sets)
    _add_download(sets)


def _add_openmoji(sets: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "the demo's images, autoencoder and encodings, from Python packages"
    parser = sets.add_parser("openmoji", allow_abbrev=False, help=text, description=text)
    _add_force(parser)
    add_paths(parser)
    parser.set_defaults(action=_openmoji)


def _add_cc12m(sets: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "MLPerf's training set: cc12m-wds, cleaned like the reference"
    parser = sets.add_parser("cc12m", allow_abbrev=False, help=text, description=text)
    parser.add_argument(
        "--input",
        required=True,
        metavar="DIR|URL",
        help="folder of raw tars, URL of a manifest, or hf://datasets/pixparse/cc12m-wds (required)",
    )
    _add_output(parser)
    parser.add_argument(
        "--samples",
        type=_count_or_all,
        default=1_099_776,
        metavar="N|all",
        help="the first N usable samples (default: MLPerf's 1,099,776)",
    )
    parser.add_argument(
        "--problematic",
        type=path,
        metavar="FILE",
        help="indices to leave out, one per line, such as the reference's problematic_indices.txt",
    )
    _add_workers(parser)
    _add_force(parser)
    parser.set_defaults(action=_cc12m)


def _add_coco(sets: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "MLPerf's validation set: a subset of COCO-2014 with timesteps"
    parser = sets.add_parser("coco", allow_abbrev=False, help=text, description=text)
    parser.add_argument(
        "--images", type=path, required=True, metavar="DIR", help="the folder val2014 (required)"
    )
    parser.add_argument(
        "--captions",
        type=path,
        required=True,
        metavar="FILE",
        help="captions_val2014.json (required)",
    )
    _add_output(parser)
    parser.add_argument(
        "--samples",
        type=_count,
        default=29_696,
        metavar="N",
        help="samples (default: MLPerf's 29,696)",
    )
    _add_workers(parser)
    _add_force(parser)
    parser.set_defaults(action=_coco)


def _add_download(sets: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "download and verify the files of an MLCommons manifest or of a data set on the Hub"
    parser = sets.add_parser("download", allow_abbrev=False, help=text, description=text)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--manifest", metavar="URL|FILE", help="manifest that ends in .uri or .md5")
    where.add_argument("--hub", metavar="ORG/NAME", help="a data set on the Hugging Face Hub")
    _add_output(parser)
    parser.add_argument("--base", metavar="URL|DIR", help="location of the manifest's files")
    parser.add_argument(
        "--revision", default="main", help="revision of the data set on the Hub (default: main)"
    )
    parser.add_argument(
        "--include",
        default="*",
        metavar="PATTERN",
        help="pattern of the files on the Hub (default: all)",
    )
    parser.add_argument(
        "--connections",
        type=_count,
        default=8,
        metavar="N",
        help="parallel connections (default: 8)",
    )
    parser.add_argument(
        "--timeout",
        type=_count,
        default=60,
        metavar="SECONDS",
        help="timeout of a request (default: 60)",
    )
    parser.add_argument(
        "--attempts", type=_count, default=5, metavar="N", help="attempts per file (default: 5)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="verify files again that were verified before"
    )
    parser.set_defaults(action=_download)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=path, required=True, metavar="DIR", help="folder to write (required)"
    )


def _add_workers(parser: argparse.ArgumentParser) -> None:
    text = "worker processes (default: one per core); the result does not depend on it"
    parser.add_argument("--workers", type=_count, metavar="N", help=text)


def _add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="recreate it even if it is complete")


def _resumable(action: Action) -> Action:
    """Let Ctrl-C end ``action`` with one line instead of a traceback."""

    @wraps(action)
    def stoppable(arguments: argparse.Namespace, rest: list[str]) -> int:
        try:
            return action(arguments, rest)
        except KeyboardInterrupt:
            raise StoppedError("stopped; the same command resumes") from None

    return stoppable


def _openmoji(arguments: argparse.Namespace, rest: list[str]) -> int:
    from fluxtrain.prepare.openmoji.build import prepare_openmoji

    reject_unknown(rest)
    prepare_openmoji(arguments.data.resolve(), arguments.models.resolve(), force=arguments.force)
    return EXIT_OK


@_resumable
def _cc12m(arguments: argparse.Namespace, rest: list[str]) -> int:
    from fluxtrain.prepare.cc12m.build import prepare_cc12m, read_problematic
    from fluxtrain.prepare.cc12m.source import open_source

    reject_unknown(rest)
    prepare_cc12m(
        open_source(arguments.input),
        arguments.output.resolve(),
        arguments.samples,
        read_problematic(arguments.problematic) if arguments.problematic else frozenset(),
        arguments.workers,
        arguments.force,
    )
    return EXIT_OK


@_resumable
def _coco(arguments: argparse.Namespace, rest: list[str]) -> int:
    from fluxtrain.prepare.coco.build import prepare_coco

    reject_unknown(rest)
    prepare_coco(
        arguments.images,
        arguments.captions,
        arguments.output.resolve(),
        arguments.samples,
        arguments.workers,
        arguments.force,
    )
    return EXIT_OK


@_resumable
def _download(arguments: argparse.Namespace, rest: list[str]) -> int:
    from fluxtrain.prepare.download.download import download
    from fluxtrain.prepare.download.http import HttpClient
    from fluxtrain.prepare.download.hub import open_hub

    reject_unknown(rest)
    if arguments.hub:
        dataset = open_hub(arguments.hub, arguments.revision)
        dataset.fetch_all(arguments.include, arguments.output, arguments.connections)
        return EXIT_OK
    client = HttpClient(timeout=arguments.timeout, attempts=arguments.attempts)
    download(
        arguments.manifest,
        arguments.output,
        arguments.base,
        arguments.connections,
        client,
        arguments.verify,
    )
    return EXIT_OK


def _count(word: str) -> int:
    if not (word.isascii() and word.isdigit() and 0 < int(word) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{word!r} is not a count of 1 or more")
    return int(word)


def _count_or_all(word: str) -> int | None:
    return None if word == "all" else _count(word)
