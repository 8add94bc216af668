"""``fluxtrain data check SOURCE``: what a training would make of its pictures, before it starts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fluxtrain.cli import data_pack, reference_environment
from fluxtrain.cli.arguments import Commands, add_command, described, load_config, path
from fluxtrain.cli.field_help import add_field_help
from fluxtrain.cli.parser import whole_number
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.pictures.sheet_mark import FILE, is_contact_sheet
from fluxtrain.errors import (
    EXIT_ERROR,
    EXIT_OK,
    EXIT_USAGE,
    UNSET,
    ConfigError,
    FluxtrainError,
    StorageError,
)

if TYPE_CHECKING:
    from fluxtrain.data.pictures.contact_sheet import ContactSheet
    from fluxtrain.picture_cache.check import PictureCheck

_SIZE = 1024


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("data", allow_abbrev=False, help="look at pictures to train on")
    inner = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    text = "check all pictures, captions and masks of a run, and draw a contact sheet"
    check = add_command(inner, "check", action, help=text, description=described(__doc__))
    add_field_help(check)
    check.epilog = (
        "exit code: 0 a run would train on them; 1 it would fail, or with --strict leave some out; "
        "2 the command or FILE is wrong. Every field of spec.run can be set, such as --data.masks=alpha"
    )
    text = "as spec.run.data.images: a folder, a data set config, shards, Parquet files, or a URL"
    check.add_argument("source", nargs="?", metavar="SOURCE", help=text)
    text = "the FluxTraining whose pictures are checked, instead of SOURCE"
    check.add_argument("-f", "--file", type=path, metavar="FILE", help=text)
    text = "root of relative paths (default: the current folder; with -f as of fluxtrain run)"
    check.add_argument("--data", type=path, help=text)
    text = f"with SOURCE: side in pixels of the training's squares (default: {_SIZE})"
    check.add_argument("--image-size", type=whole_number, help=text)
    text = f"PNG to write (default: {FILE}); only a contact sheet is replaced"
    check.add_argument("--contact-sheet", type=path, default=Path(FILE), help=text)
    check.add_argument("--all", action="store_true", help="name all files, not only the first ones")
    check.add_argument("--strict", action="store_true", help="exit with 1 if a file is left out")
    check.add_argument("--json", action="store_true", help="print JSON")
    data_pack.add(inner)


def action(arguments: argparse.Namespace) -> int:
    """Print what is used, changed and left out; return 0 if a run would train on the pictures."""
    _require_one(arguments)
    _require_replaceable(arguments.contact_sheet)
    config: RunConfig | None = None
    try:
        config = _config(arguments)
        found = _check(config, _root(arguments), is_shown=sys.stderr.isatty())
        _print_notes(config, _root(arguments))
        _require_some(found)
    except FluxtrainError as error:
        if arguments.json:
            print(json.dumps({"error": str(error)}, indent=2))
        print(f"fluxtrain: error: {error}", file=sys.stderr)
        return EXIT_USAGE if config is None else EXIT_ERROR
    from fluxtrain.cli.data_report import as_json, as_text

    sheet = _draw(arguments.contact_sheet, found)
    if arguments.json:
        values = as_json(config, found, arguments.contact_sheet) | {"not_drawn": sheet.lacking}
        print(json.dumps(values, indent=2))
    else:
        last = _sheet_lines(arguments.contact_sheet, sheet, len(found.inspection.looks))
        print("\n".join([*as_text(config, found, names_all=arguments.all), *last]))
    return EXIT_ERROR if arguments.strict and found.inspection.skipped else EXIT_OK


def _require_one(arguments: argparse.Namespace) -> None:
    if (arguments.source is None) == (arguments.file is None):
        raise ConfigError("SOURCE", UNSET, "give either SOURCE or -f FILE")
    size = arguments.image_size
    if size is None:
        return
    if arguments.file is not None:
        raise ConfigError("--image-size", size, "must be left out with -f: the file has it")
    if not 16 <= size <= 32_768 or size % 16:
        raise ConfigError("--image-size", size, "must be a multiple of 16 from 16 to 32768")


def _require_replaceable(file: Path) -> None:
    """Raise ConfigError if ``file`` exists and is no contact sheet."""
    try:
        if not file.exists() or is_contact_sheet(file):
            return
    except OSError as error:
        text = f"cannot be read ({error.strerror}); remove it or name another"
        raise ConfigError("--contact-sheet", str(file), text) from None
    text = "exists and is no contact sheet of fluxtrain; remove it or name another"
    raise ConfigError("--contact-sheet", str(file), text)


def _require_no_picture(file: Path, config: RunConfig, root: Path) -> None:
    """Raise ConfigError if the contact sheet ``file`` would be a picture of the run."""
    from fluxtrain.data.pictures.subset import subsets

    folders = list[Path]()
    with suppress(FluxtrainError):  # whoever lists its pictures says what is wrong
        for subset in subsets(config.data, root):
            folders += filter(None, (subset.folder, subset.masks))
    place = file.resolve()
    for folder in folders:
        if place.name != FILE and place.is_relative_to(folder.resolve()):
            text = f"is in {folder} and would be one of its pictures; put it elsewhere, or call it {FILE}"
            raise ConfigError("--contact-sheet", str(file), text)


def _config(arguments: argparse.Namespace) -> RunConfig:
    """Return the config of the file, or of a LoRA of SOURCE, with any seed."""
    from fluxtrain.random_seed import with_any_seed

    if arguments.file is not None:
        _, config = load_config(arguments.file, arguments.overrides, quiet=True)
    else:
        overrides = parse_overrides(arguments.overrides)
        run = run_of_source(arguments.source, _root(arguments), arguments.image_size)
        config = resolve(merge(run, overrides))
    if config.data.images is None:
        raise ConfigError("spec.run.data.images", None, "must name the pictures that are checked")
    _require_no_picture(arguments.contact_sheet, config, _root(arguments))
    return with_any_seed(config)


def run_of_source(source: str, data_root: Path, image_size: int | None = None) -> dict[str, Any]:
    """Return the run of a LoRA on ``source`` with pictures of ``image_size``.

    The default are the sizes that ``source`` asks for, if it is a data set config, else 1024.
    """
    from fluxtrain.data.pictures.kohya import is_dataset_config, own_sizes

    path, size = data_root / source, image_size or _SIZE
    sizes: dict[str, Any] = {"image_size": size}
    if image_size is None and is_dataset_config(path) and path.is_file():
        with suppress(FluxtrainError):  # whoever lists its pictures says what is wrong
            sizes |= own_sizes(path)
    return {"preset": "dev-lora", "data": {"images": source, **sizes}}


def _print_notes(config: RunConfig, data_root: Path) -> None:
    from fluxtrain.data.pictures.subset import notes

    for note in notes(config.data, data_root, config.schedule.global_batch_size):
        print(f"fluxtrain: {note}", file=sys.stderr)


def _root(arguments: argparse.Namespace) -> Path:
    if arguments.data is not None:
        return Path(arguments.data)
    if arguments.source is not None:
        return Path()
    return Path(reference_environment.root("data", os.environ).value)


def _check(config: RunConfig, root: Path, is_shown: bool) -> PictureCheck:
    from tqdm import tqdm

    from fluxtrain.picture_cache.check import check_run, run_pictures

    with TemporaryDirectory() as output:
        paths = RunPaths(Path(output), root, root)
        with (
            run_pictures(config, paths, is_shown) as (pictures, left_out),
            tqdm(total=len(pictures), unit="picture", disable=not is_shown) as bar,
        ):
            return check_run(config, pictures, left_out, bar.update)


def _require_some(found: PictureCheck) -> None:
    from fluxtrain.picture_cache.work import nothing_left

    if not found.inspection.used:
        raise nothing_left(found.inspection.skipped)


def _draw(file: Path, found: PictureCheck) -> ContactSheet:
    """Write the contact sheet."""
    from fluxtrain.data.pictures.contact_sheet import save_contact_sheet

    try:
        return save_contact_sheet(file, found.inspection)
    except OSError as error:
        text = f"--contact-sheet {file}: cannot be written ({error.strerror})"
        raise StorageError(text) from None


def _sheet_lines(file: Path, sheet: ContactSheet, pictures: int) -> Iterator[str]:
    """Yield the lines that tell of the contact sheet."""
    from fluxtrain.data.pictures.glyphs import SUGGESTED, named

    of = (
        "" if sheet.pictures == pictures else f", the first {sheet.pictures} of {pictures} pictures"
    )
    yield f"contact sheet: {file}{of}"
    if sheet.lacking:
        text = f"no font here has {named(sheet.lacking)}, which are not drawn"
        yield f"contact sheet: {text}; install one such as {SUGGESTED}"
