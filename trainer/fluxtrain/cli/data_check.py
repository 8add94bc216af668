"""``fluxtrain data check FOLDER``: what a training would make of a folder of pictures, before it starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fluxtrain.cli.arguments import Commands, add_command, described, path
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE, ConfigError, StorageError

if TYPE_CHECKING:
    from fluxtrain.data.pictures.inspection import Inspection

_MAX_NAMED = 5
_CONTACT_SHEET = "contact-sheet.png"


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("data", allow_abbrev=False, help="look at a folder of pictures")
    inner = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    text = "check all pictures and captions of a folder, and draw a contact sheet"
    check = add_command(inner, "check", action, help=text, description=described(__doc__))
    check.epilog = "exit code: 0 all files are used; 1 some are not; 2 none is"
    check.add_argument("folder", type=path, metavar="FOLDER", help="as spec.run.data.images")
    text = "side in pixels of the training's squares (default: 1024)"
    check.add_argument("--image-size", type=int, default=1024, help=text)
    text = f"PNG to write (default: {_CONTACT_SHEET})"
    check.add_argument("--contact-sheet", type=path, default=Path(_CONTACT_SHEET), help=text)
    check.add_argument("--all", action="store_true", help="name all files, not only the first ones")


def action(arguments: argparse.Namespace) -> int:
    """Print what is used, changed and left out; return 0 if all files are used."""
    size = arguments.image_size
    if not 16 <= size <= 32_768 or size % 16:
        raise ConfigError("--image-size", size, "must be a multiple of 16 from 16 to 32768")
    from tqdm import tqdm

    from fluxtrain.data.pictures.contact_sheet import save_contact_sheet
    from fluxtrain.data.pictures.folder import list_pictures
    from fluxtrain.data.pictures.inspection import inspect

    listing = list_pictures(arguments.folder)
    threads = len(os.sched_getaffinity(0))
    shown = sys.stderr.isatty()
    with tqdm(total=len(listing.pictures), unit="picture", disable=not shown) as bar:
        found = inspect(listing, size, threads, bar.update)
    most = len(found.looks) + len(found.skipped) if arguments.all else _MAX_NAMED
    for line in _report(found, most):
        print(line)
    try:
        count = save_contact_sheet(arguments.contact_sheet, found)
    except OSError as error:
        text = f"--contact-sheet {arguments.contact_sheet}: cannot be written ({error.strerror})"
        raise StorageError(text) from None
    of = "" if count == len(found.looks) else f", the first {count} of {len(found.looks)} pictures"
    print(f"contact sheet: {arguments.contact_sheet}{of}")
    if not found.used:
        return EXIT_USAGE
    return EXIT_ERROR if found.skipped else EXIT_OK


def _report(found: Inspection, most: int) -> Iterator[str]:
    """Yield the lines of the report; of each kind ``most`` files are named."""
    used, size = found.used, found.image_size
    kinds = ", ".join(f"{count} {suffix[1:]}" for suffix, count in found.kinds().most_common())
    yield f"{found.listing.folder}: {_counted(len(used), 'picture')} can be used" + (
        f" ({kinds})" if kinds else ""
    )
    if used:
        areas = sorted(used, key=lambda look: look.width * look.height)
        ends = " to ".join(f"{look.width} x {look.height}" for look in (areas[0], areas[-1]))
        yield f"sizes: {ends} pixels; trained at {size} x {size}"
    yield from _named(
        "without a caption (data.class_tokens, else the empty prompt)",
        (look.file.name for look in found.without_caption),
        most,
    )
    yield from _named(
        "enlarged",
        (
            f"{look.file.name}: {look.width} x {look.height}, {look.scale:.1f} times"
            for look in found.enlarged
        ),
        most,
    )
    yield from _named(
        "cropped to less than 60 %",
        (
            f"{look.file.name}: {look.width} x {look.height}, {look.seen:.0%} is seen"
            for look in found.much_cropped
        ),
        most,
    )
    yield from _named(
        "equal to the byte",
        (" = ".join(look.file.name for look in group) for group in found.equal),
        most,
        unit="group",
    )
    faults = (f"{name}: {reason}" for name, reason in found.skipped.items())
    yield from _named("that cannot be used", faults, most, unit="file")


def _named(title: str, lines: Iterable[str], most: int, unit: str = "picture") -> Iterator[str]:
    listed = list(lines)
    if not listed:
        return
    yield f"{_counted(len(listed), unit)} {title}:"
    yield from (f"  {line}" for line in listed[:most])
    if len(listed) > most:
        yield f"  … and {len(listed) - most} more (--all names them)"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
