"""``fluxtrain prepare``: download and prepare data sets."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from getpass import getpass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from fluxtrain.cli.arguments import (
    Commands,
    add_command,
    add_file,
    add_paths,
    given_root,
    load_config,
    output,
    path,
)
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import EXIT_OK, UNSET, ConfigError, DataError, StoppedError, redacted
from fluxtrain.runtime.progress import handled

if TYPE_CHECKING:
    from fluxtrain.prepare.encoders import EncoderSource


Parser = argparse.ArgumentParser
_PLACE = "DIR|MANIFEST|URL"


def add(parser: argparse.ArgumentParser) -> None:
    sets = parser.add_subparsers(dest="what", required=True, metavar="SET")
    _add_openmoji(sets)
    _add_cc12m(sets)
    _add_coco(sets)
    _add_download(sets)
    _add_encoders(sets)


def add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=_fetch)
    add_file(parser)
    add_paths(parser)
    add_from(parser)


def add_from(parser: Parser) -> None:
    text = "where FLUX.1 is, as published (default: its publisher's repository on the Hub)"
    parser.add_argument("--from", dest="published", metavar=_PLACE, help=text)


def _fetch(arguments: argparse.Namespace) -> int:
    job, config = load_config(arguments.file, arguments.overrides, quiet=True)
    models, data = arguments.models.resolve(), arguments.data.resolve()
    fetch_missing(config, models, arguments.published)
    folder = Path(output(job.metadata.name, os.environ).value)
    _fetch_pictures(config, RunPaths(folder, data, models))
    roots = "".join(given_root(arguments, name) for name in ("data", "models"))
    next_step = f"fluxtrain run {shlex.quote(str(arguments.file))}{roots}"
    print(f"{models} has the weights that {arguments.file} names; next: {next_step}")
    return EXIT_OK


@contextmanager
def stoppable() -> Iterator[None]:
    """End what is fetched at SIGTERM, which the first process of a container ignores without a handler."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        raise StoppedError("stopped while it fetched; the same command resumes")

    with handled(stop, signal.SIGTERM):
        yield


def fetch_missing(
    config: RunConfig, models: Path, published: str | None, wait_seconds: float = 0.0
) -> None:
    """Fetch what a run of ``config`` misses below ``models``; DataError for what is not published.

    At a terminal it asks once for a token that a licence needs, which only this process keeps.
    """
    from fluxtrain.encode.encoders import missing_models, next_step
    from fluxtrain.prepare.download import LicenceError
    from fluxtrain.prepare.encoders import fetch_models

    if config.encoders.text == "minilm":  # the demo's, which nobody publishes
        if missing := missing_models(config, models):
            text = f"not in {models}: {', '.join(missing)}"
            raise DataError(f"{text}; {next_step(config)}")
        return
    try:
        missing = fetch_models(config, models, published, wait_seconds)
    except LicenceError as error:
        if os.environ.get("HF_TOKEN") or not sys.stdin.isatty():
            raise
        print(error, file=sys.stderr)
        try:
            os.environ["HF_TOKEN"] = getpass("its token, which is not shown or stored: ")
        except EOFError:
            raise error from None
        missing = fetch_models(config, models, published, wait_seconds)
    if missing:
        place = redacted((published or "FLUX.1's publisher").rstrip("/"))
        text = f"not in {models}: {', '.join(missing)}; {place} has no such files"
        raise DataError(f"{text}: put them there")


def _fetch_pictures(config: RunConfig, paths: RunPaths) -> None:
    """Fetch the pictures at URLs to the folder of this node, where a run finds them."""
    from fluxtrain.data.pictures.subset import remote_sources
    from fluxtrain.picture_cache.fetching import local_pictures

    if config.data.images is None or not remote_sources(config.data, paths.data):
        return
    if config.data.download.stream:
        print("the pictures are not fetched: data.download.stream is set", file=sys.stderr)
        return
    with local_pictures(config.data, paths, lambda: None, is_shown=True) as places:
        for url, folder in places.items():
            print(f"{redacted(url)}: in {folder}", file=sys.stderr)


def _add_openmoji(sets: Commands) -> None:
    text = "the demo's images, autoencoder and encodings, from Python packages"
    parser = add_command(sets, "openmoji", _openmoji, help=text)
    _add_force(parser)
    add_paths(parser)


def _add_cc12m(sets: Commands) -> None:
    text = "MLPerf's training set: cc12m-wds, cleaned like the reference"
    parser = _add_resumable(sets, "cc12m", _cc12m, text)
    text = "folder of raw tars, URL of a manifest, or hf://datasets/pixparse/cc12m-wds (required)"
    parser.add_argument("--input", required=True, metavar="DIR|URL", help=text)
    _add_output(parser)
    text = "the first N usable samples (default: MLPerf's 1,099,776)"
    parser.add_argument(
        "--samples", type=_count_or_all, default=1_099_776, metavar="N|all", help=text
    )
    text = "indices to leave out, one per line, such as the reference's problematic_indices.txt"
    parser.add_argument("--problematic", type=path, metavar="FILE", help=text)
    _add_workers(parser)
    _add_force(parser)


def _add_coco(sets: Commands) -> None:
    text = "MLPerf's validation set: a subset of COCO-2014 with timesteps"
    parser = _add_resumable(sets, "coco", _coco, text)
    text = "COCO's two archives, verified by their SHA-1 and unpacked beside the output"
    parser.add_argument("--archives", metavar="URL|DIR", help=text)
    text = "the folder val2014, unpacked (instead of --archives)"
    parser.add_argument("--images", type=path, metavar="DIR", help=text)
    text = "captions_val2014.json (with --images)"
    parser.add_argument("--captions", type=path, metavar="FILE", help=text)
    _add_output(parser)
    _add_count(parser, "--samples", 29_696, "samples (default: MLPerf's 29,696)")
    _add_workers(parser)
    _add_force(parser)


def _add_download(sets: Commands) -> None:
    text = "download and verify the files of an MLCommons manifest or of a data set on the Hub"
    parser = _add_resumable(sets, "download", _download, text)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--manifest", metavar="URL|FILE", help="manifest that ends in .uri or .md5")
    where.add_argument("--hub", metavar="ORG/NAME", help="a data set on the Hugging Face Hub")
    _add_output(parser)
    parser.add_argument("--base", metavar="URL|DIR", help="location of the manifest's files")
    text = "revision of the data set on the Hub (default: main)"
    parser.add_argument("--revision", default="main", help=text)
    text = "pattern of the files on the Hub (default: all)"
    parser.add_argument("--include", default="*", metavar="PATTERN", help=text)
    _add_count(parser, "--connections", 8, "parallel connections (default: 8)")
    _add_count(parser, "--timeout", 60, "timeout of a request (default: 60)", metavar="SECONDS")
    _add_count(parser, "--attempts", 5, "attempts per file (default: 5)")
    text = "verify files again that were verified before"
    parser.add_argument("--verify", action="store_true", help=text)


def _add_encoders(sets: Commands) -> None:
    text = "T5, CLIP and the autoencoder, verified; what encodes raw images and samples"
    parser = _add_resumable(sets, "encoders", _encoders, text)
    text = (
        "FLUX.1 as published: text_encoder, text_encoder_2, tokenizer, tokenizer_2, ae.safetensors"
    )
    parser.add_argument("--from", dest="published", metavar=_PLACE, help=text)
    for name, help_text in _OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, metavar=_PLACE, help=f"{help_text} (instead of --from's)")
    text = "the models root, which gets t5, clip and autoencoder (required)"
    parser.add_argument("--output", type=path, required=True, metavar="DIR", help=text)
    parser.add_argument("--force", action="store_true", help="collect them again if they are there")


def _add_resumable(
    sets: Commands, name: str, prepare: Callable[[argparse.Namespace], int], text: str
) -> Parser:
    """Add the data set ``name``; Ctrl-C ends ``prepare`` with one line instead of a traceback."""

    def action(arguments: argparse.Namespace) -> int:
        try:
            return prepare(arguments)
        except KeyboardInterrupt:
            raise StoppedError("stopped; the same command resumes") from None

    return add_command(sets, name, action, help=text)


def _add_output(parser: Parser) -> None:
    parser.add_argument(
        "--output", type=path, required=True, metavar="DIR", help="folder to write (required)"
    )


def _add_workers(parser: Parser) -> None:
    text = "worker processes (default: one per core); the result does not depend on it"
    _add_count(parser, "--workers", None, text)


def _add_force(parser: Parser) -> None:
    parser.add_argument("--force", action="store_true", help="recreate it even if it is complete")


def _add_count(
    parser: Parser, option: str, default: int | None, text: str, metavar: str = "N"
) -> None:
    parser.add_argument(option, type=_count, default=default, metavar=metavar, help=text)


def _openmoji(arguments: argparse.Namespace) -> int:
    from fluxtrain.prepare.openmoji import prepare_openmoji

    prepare_openmoji(arguments.data.resolve(), arguments.models.resolve(), force=arguments.force)
    return EXIT_OK


def _cc12m(arguments: argparse.Namespace) -> int:
    from fluxtrain.prepare.cc12m import prepare_cc12m, read_problematic
    from fluxtrain.prepare.download import open_source

    prepare_cc12m(
        open_source(arguments.input),
        arguments.output.resolve(),
        arguments.samples,
        read_problematic(arguments.problematic) if arguments.problematic else frozenset(),
        arguments.workers,
        arguments.force,
    )
    return EXIT_OK


def _coco(arguments: argparse.Namespace) -> int:
    from fluxtrain.prepare.coco import prepare_coco

    output = arguments.output.resolve()
    images, captions = _raw_coco(arguments, output)
    prepare_coco(images, captions, output, arguments.samples, arguments.workers, arguments.force)
    return EXIT_OK


def _raw_coco(arguments: argparse.Namespace, output: Path) -> tuple[Path, Path]:
    """Return the folder of the images and the file of the captions; raise ConfigError without them."""
    from fluxtrain.prepare.coco import unpack

    unpacked = (arguments.images, arguments.captions)
    if arguments.archives is None and None not in unpacked:
        return arguments.images, arguments.captions
    if arguments.archives is None or unpacked != (None, None):
        text = "give --archives, or both --images and --captions"
        raise ConfigError("--archives", arguments.archives, text)
    folder = output.with_name(f"{output.name}.raw")
    return unpack(arguments.archives, folder, arguments.samples)


def _download(arguments: argparse.Namespace) -> int:
    from fluxtrain.fetch.http import HttpClient
    from fluxtrain.prepare.download import download, open_hub

    if arguments.hub:
        dataset = open_hub(arguments.hub, arguments.revision)
        dataset.fetch_all(arguments.include, arguments.output, arguments.connections)
        return EXIT_OK
    download(
        arguments.manifest,
        arguments.output,
        arguments.base,
        arguments.connections,
        HttpClient(timeout=arguments.timeout, attempts=arguments.attempts),
        arguments.verify,
    )
    return EXIT_OK


def _count(word: str) -> int:
    if not (word.isascii() and word.isdigit() and 0 < int(word) < 1 << 31):
        raise argparse.ArgumentTypeError(f"got {word[:80]!r}; must be a whole number, 1 or more")
    return int(word)


def _count_or_all(word: str) -> int | None:
    return None if word == "all" else _count(word)


_OPTIONS = {
    "t5": "folder of T5 in transformers' format, with its tokenizer",
    "t5_tokenizer": "folder of T5's tokenizer, if it is another one",
    "clip": "folder of CLIP's text encoder in transformers' format, with its tokenizer",
    "clip_tokenizer": "folder of CLIP's tokenizer, if it is another one",
    "autoencoder": "folder that holds ae.safetensors",
}


def _encoders(arguments: argparse.Namespace) -> int:
    from fluxtrain.prepare.encoders import prepare_encoders

    models = arguments.output.resolve()
    prepare_encoders(_wanted(arguments, models), models, arguments.force)
    return EXIT_OK


def _wanted(arguments: argparse.Namespace, models: Path) -> dict[str, list[EncoderSource]]:
    """Return the places of each encoder that the options name; raise ConfigError if they name none."""
    from fluxtrain.prepare.encoders import PUBLISHED, parse_source

    def place(name: str) -> EncoderSource | None:
        given = getattr(arguments, name)
        flag = "--from" if name == "published" else f"--{name.replace('_', '-')}"
        return None if given is None else parse_source(given, models / f".{name}.download", flag)

    published = place("published")
    wanted: dict[str, list[EncoderSource]] = {}
    for name, folders in PUBLISHED.items():
        own, tokenizer = place(name), place(f"{name}_tokenizer") if name != "autoencoder" else None
        if own is not None:
            wanted[name] = [own] if tokenizer is None else [own, tokenizer]
        elif published is not None:
            places = [published.below(folder) for folder in folders]
            wanted[name] = places if tokenizer is None else [places[0], tokenizer]
        elif tokenizer is not None:
            text = "needs the encoder: --from, or the folder of its weights"
            raise ConfigError(f"--{name}-tokenizer", getattr(arguments, f"{name}_tokenizer"), text)
    if not wanted:
        raise ConfigError("--from", UNSET, "give --from, or --t5, --clip or --autoencoder")
    return wanted
