"""``fluxtrain data check``, ``data pack`` and ``convert``: pictures and encoded samples before training."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

from fluxtrain.cli import arguments as reference_environment
from fluxtrain.cli.arguments import (
    Commands,
    add_command,
    add_field_help,
    load_config,
    path,
    whole_number,
)
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import Layout
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.pictures.folder import FILE, is_contact_sheet
from fluxtrain.errors import (
    EXIT_ERROR,
    EXIT_OK,
    EXIT_USAGE,
    UNSET,
    ConfigError,
    FluxtrainError,
    StorageError,
    one_line,
    redacted,
)
from fluxtrain.runtime.progress import binary, counted

if TYPE_CHECKING:
    from fluxtrain.data.pictures.inspection import ContactSheet, Inspection, Look
    from fluxtrain.picture_cache.check import PictureCheck


_SIZE = 1024


def add_data(parser: argparse.ArgumentParser) -> None:
    inner = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    text = "check all pictures, captions and masks of a run, and draw a contact sheet"
    check = add_command(
        inner,
        "check",
        check_data,
        help=text,
        description="What a training would make of its pictures, before it starts.",
    )
    add_field_help(check)
    check.epilog = (
        "exit code: 0 a run would train on them; 1 it would fail, as with more than --data.max_skipped "
        "left out, or with --strict leave some out; "
        "2 the command or FILE is wrong. "
        "Every field of spec.run can be set, such as --data.masks=alpha"
    )
    text = "as spec.run.data.images: a folder, a data set config, shards, Parquet files, or a URL"
    check.add_argument("source", nargs="?", metavar="SOURCE", help=text)
    text = "the FluxTraining whose pictures are checked, instead of SOURCE"
    check.add_argument("-f", "--file", type=path, metavar="FILE", help=text)
    text = "root of relative paths (default: that of fluxtrain run, else the current folder)"
    check.add_argument("--data", type=path, help=text)
    text = "with SOURCE: side in pixels of the training's squares "
    text += f"(default: a folder's sizes as of fluxtrain init, else {_SIZE})"
    check.add_argument("--image-size", type=whole_number, help=text)
    text = f"PNG to write (default: {FILE}, if it can be); only a contact sheet is replaced"
    check.add_argument("--contact-sheet", type=path, help=text)
    check.add_argument("--all", action="store_true", help="name all files, not only the first ones")
    check.add_argument("--strict", action="store_true", help="exit with 1 if a file is left out")
    check.add_argument("--json", action="store_true", help="print JSON")
    add_pack(inner)


def check_data(arguments: argparse.Namespace) -> int:
    """Print what is used, changed and left out; return 0 if a run would train on the pictures."""
    _require_one(arguments)
    is_default = arguments.contact_sheet is None
    arguments.contact_sheet = arguments.contact_sheet or Path(FILE)
    _require_replaceable(arguments.contact_sheet)
    config: RunConfig | None = None
    try:
        config = _config(arguments)
        found = check_pictures(config, _root(arguments))
        if _is_folder(arguments) and found.inspection.used:
            from fluxtrain.plan.first_file import length
            from fluxtrain.runtime.devices import num_visible

            changes = length(len(found.inspection.used), num_visible())
            changes = merge(changes, parse_overrides(arguments.overrides))
            config = resolve(merge(config.model_dump(mode="json"), changes))
            found = check_pictures(config, _root(arguments), known=found.inspection)
        _print_notes(config, _root(arguments))
        refusal = found.refusal(config)
        if refusal and not found.inspection.used:
            raise refusal
    except FluxtrainError as error:
        if arguments.json:
            print(json.dumps({"error": str(error)}, indent=2))
        print(f"fluxtrain: error: {error}", file=sys.stderr)
        return EXIT_USAGE if config is None else EXIT_ERROR

    sheet = _draw(arguments.contact_sheet, found, is_default)
    if arguments.json:
        values = as_json(config, found, arguments.contact_sheet)
        values |= {"not_drawn": sheet.lacking} if sheet else {"contact_sheet": None}
        print(json.dumps(values | {"error": refusal and str(refusal)}, indent=2))
    else:
        looks = found.inspection.looks
        last = _sheet_lines(arguments.contact_sheet, sheet, len(looks)) if sheet else ()
        print("\n".join([*as_text(config, found, names_all=arguments.all), *last]))
    if refusal:
        print(f"fluxtrain: error: {refusal}", file=sys.stderr)
    is_left_out = arguments.strict and found.inspection.skipped
    return EXIT_ERROR if refusal or is_left_out else EXIT_OK


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
    try:
        if not file.exists() or is_contact_sheet(file):
            return
    except OSError as error:
        text = f"cannot be read ({error.strerror}); remove it or name another"
        raise ConfigError("--contact-sheet", str(file), text) from None
    text = "exists and is no contact sheet of fluxtrain; remove it or name another"
    raise ConfigError("--contact-sheet", str(file), text)


def _config(arguments: argparse.Namespace) -> RunConfig:
    """Return the config of the file, or of a LoRA of SOURCE, with any seed."""
    from fluxtrain.state.random_seed import with_any_seed

    if arguments.file is not None:
        _, config = load_config(arguments.file, arguments.overrides, quiet=True)
    else:
        overrides = parse_overrides(arguments.overrides)
        root = reference_environment.root("data", os.environ).value
        is_local = not (arguments.source.startswith((".", "/")) or "://" in arguments.source)
        if is_local and arguments.data is None and _root(arguments) == Path():
            text = f"{arguments.source} is looked for here; fluxtrain run looks in {root}, or in --data"
            print(f"fluxtrain: {text}", file=sys.stderr)
        data_root = _root(arguments)
        run = run_of_source(arguments.source, data_root, arguments.image_size)
        if arguments.image_size is None and _is_folder(arguments):
            with suppress(FluxtrainError):  # whoever lists its pictures says what is wrong
                run = merge(run, {"data": chosen_sizes(merge(run, overrides), data_root)})
        config = resolve(merge(run, overrides))
    if config.data.images is None:
        raise ConfigError("spec.run.data.images", None, "must name the pictures that are checked")
    from fluxtrain.data.pictures.subset import subsets

    folders = list[Path]()
    with suppress(FluxtrainError):  # whoever lists its pictures says what is wrong
        for subset in subsets(config.data, _root(arguments)):
            folders += filter(None, (subset.folder, subset.masks))
    place = arguments.contact_sheet.resolve()
    for folder in folders:
        if place.name != FILE and place.is_relative_to(folder.resolve()):
            text = f"is in {folder} and would be one of its pictures; put it elsewhere, or call it {FILE}"
            raise ConfigError("--contact-sheet", str(arguments.contact_sheet), text)
    return with_any_seed(config)


def _is_folder(arguments: argparse.Namespace) -> bool:
    return arguments.file is None and (_root(arguments) / arguments.source).is_dir()


def run_of_source(source: str, data_root: Path, image_size: int | None = None) -> dict[str, Any]:
    """Return the run of a LoRA on ``source`` with pictures of ``image_size``.

    The default are the sizes that ``source`` asks for, if it is a data set config, else 1024.
    """
    from fluxtrain.data.pictures.kohya_config import is_dataset_config, own_sizes

    path, size = data_root / source, image_size or _SIZE
    sizes: dict[str, Any] = {"image_size": size}
    if image_size is None and is_dataset_config(path) and path.is_file():
        with suppress(FluxtrainError):  # whoever lists its pictures says what is wrong
            sizes |= own_sizes(path)
    return {"preset": "dev-lora", "data": {"images": source, **sizes}}


def chosen_sizes(run: dict[str, Any], data_root: Path) -> dict[str, Any]:
    """Return the fields of ``data`` for sizes that fit the pictures of ``run``, {} if none can be used."""
    from fluxtrain.plan.first_file import SIDES, sizes

    config = resolve(merge(run, {"data": {"image_size": SIDES[-1], "buckets": None}}))
    return sizes(check_pictures(config, data_root, decodes=False).inspection)


def _print_notes(config: RunConfig, data_root: Path) -> None:
    from fluxtrain.data.pictures.subset import notes

    for note in notes(config.data, data_root, config.schedule.global_batch_size):
        print(f"fluxtrain: {note}", file=sys.stderr)


def _root(arguments: argparse.Namespace) -> Path:
    """Return the root of relative paths: that of a run, but the current folder for what is not in it."""
    if arguments.data is not None:
        return Path(arguments.data)
    root, source = Path(reference_environment.root("data", os.environ).value), arguments.source
    if source is None or (not source.startswith(".") and os.path.exists(root / source)):
        return root
    return Path()


def check_pictures(
    config: RunConfig, root: Path, decodes: bool = True, known: Inspection | None = None
) -> PictureCheck:
    """Return what ``config`` makes of its pictures below ``root``, which it ``decodes`` or only reads.

    Those that are ``known`` in its sizes are not read again.
    """
    from fluxtrain.picture_cache.check import check_run, recounted, run_pictures
    from fluxtrain.runtime.progress_bar import ProgressBar

    is_shown = sys.stderr.isatty()
    with TemporaryDirectory() as output:
        paths = RunPaths(Path(output), root, root)
        with (
            run_pictures(config, paths, is_shown) as (pictures, skipped, left_out),
            ProgressBar("check", len(pictures), is_shown=is_shown and known is None) as bar,
        ):
            if known is not None:
                return recounted(config, pictures, known)
            return check_run(config, pictures, skipped, left_out, lambda: bar.advance(1), decodes)


def _draw(file: Path, found: PictureCheck, is_default: bool) -> ContactSheet | None:
    """Write the contact sheet; None if it cannot be written to where nobody asked for it."""
    from fluxtrain.data.pictures.inspection import save_contact_sheet

    try:
        return save_contact_sheet(file, found.inspection)
    except OSError as error:
        text = f"--contact-sheet {file}: cannot be written ({error.strerror})"
        if not is_default:
            raise StorageError(text) from None
        print(f"fluxtrain: {text}; name another file to see the pictures", file=sys.stderr)
        return None


def _sheet_lines(file: Path, sheet: ContactSheet, pictures: int) -> Iterator[str]:
    from fluxtrain.data.pictures.inspection import SUGGESTED, named

    is_whole = sheet.pictures == pictures
    of = "" if is_whole else f", the first {sheet.pictures} of {pictures} pictures"
    yield f"contact sheet: {file}{of}"
    if sheet.lacking:
        text = f"no font here has {named(sheet.lacking)}, which are not drawn"
        yield f"contact sheet: {text}; install one such as {SUGGESTED}"


def add_pack(commands: Commands) -> None:
    parser = add_command(
        commands,
        "pack",
        pack_data,
        help="write pictures and captions of any source as WebDataset shards",
        description="Write pictures with their captions as WebDataset shards.",
    )
    add_field_help(parser)
    text = "as spec.run.data.images: a folder, a data set config, shards, Parquet files, or a URL"
    parser.add_argument("source", metavar="SOURCE", help=text)
    parser.add_argument("output", type=path, metavar="OUTPUT", help="folder to make")
    text = "most pictures of a shard (default: 1000); it also ends after 1 GiB"
    parser.add_argument("--shard-size", type=whole_number, default=1000, help=text)
    text = "root of relative paths of SOURCE (default: the current folder)"
    parser.add_argument("--data", type=path, default=Path(), help=text)


def pack_data(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.shard_size <= 1_000_000:
        raise ConfigError("--shard-size", arguments.shard_size, "must be between 1 and 1000000")
    from fluxtrain.picture_cache.check import run_pictures
    from fluxtrain.picture_cache.pack import pack, require_packable
    from fluxtrain.runtime.progress_bar import ProgressBar

    run = run_of_source(arguments.source, arguments.data)
    config = resolve(merge(run, parse_overrides(arguments.overrides)))
    shown = sys.stderr.isatty()
    with TemporaryDirectory() as output:
        paths = RunPaths(Path(output), arguments.data, arguments.data)
        with (
            run_pictures(config, paths, shown) as (pictures, skipped, left_out),
            ProgressBar("pack", len(pictures), is_shown=shown) as bar,
        ):
            require_packable(pictures, arguments.source)
            packed = pack(pictures, arguments.output, arguments.shard_size, lambda: bar.advance(1))
    for name, reason in (skipped | packed.left_out | left_out).items():
        print(one_line(f"left out {name}: {reason}"), file=sys.stderr)
    shards = counted(packed.shards, "shard")
    print(f"{arguments.output}: {counted(packed.pictures, 'picture')} in {shards}")
    if repeats := {picture.repeats for picture in pictures} - {1}:
        print(f"each is used {max(repeats)} times in an epoch: set spec.run.data.repeats")
    return EXIT_OK


_MAX_NAMED, _MAX_BUCKETS = 5, 20


def as_text(config: RunConfig, check: PictureCheck, names_all: bool) -> Iterator[str]:
    """Yield the lines of the report; of each kind the first files are named, or all."""
    found = check.inspection
    kinds = ", ".join(f"{count} {suffix[1:]}" for suffix, count in found.kinds().most_common())
    source = redacted(str(config.data.images))
    yield f"{source}: {counted(len(found.used), 'picture')} can be used ({kinds})"
    for folder, count in _by_folder(found).items():
        yield f"  {folder}: {counted(count, 'sample')} in an epoch"
    yield _sizes(found, config)
    schedule, samples = config.schedule, sum(check.samples.values())
    epochs = float(schedule.epochs or check.steps / check.steps_per_epoch)
    yield (
        f"an epoch: {counted(samples, 'sample')}, {counted(float(check.steps_per_epoch), 'step')} of "
        f"{schedule.global_batch_size}; the run: {counted(check.steps, 'step')}, {counted(epochs, 'epoch')}"
    )
    if check.held_out:
        yield f"held out for the evaluation: {counted(check.held_out, 'picture')}, at eight timesteps each"
    yield (
        f"to encode: {counted(check.latents, 'latent')} and {counted(check.captions, 'caption')}, "
        f"the empty one too; {binary(check.cache_bytes)}"
    )
    if config.data.buckets is not None:
        yield from _buckets(config, check, names_all)
    most = len(found.looks) + len(found.skipped) if names_all else _MAX_NAMED
    yield from _captions(found, config.data.text_length, most)
    yield from _files(found, most)


def as_json(config: RunConfig, check: PictureCheck, sheet: Path) -> dict[str, Any]:
    """Return the report as values of JSON; all files are named."""
    found = check.inspection
    return {
        "error": None,
        "images": redacted(str(config.data.images)),
        "used": len(found.used),
        "formats": {suffix[1:]: count for suffix, count in found.kinds().items()},
        "folders": _by_folder(found),
        "with_mask": sum(look.picture.mask_path is not None for look in found.used),
        "held_out": check.held_out,
        "samples": sum(check.samples.values()),
        "global_batch_size": config.schedule.global_batch_size,
        "steps_per_epoch": check.steps_per_epoch,
        "steps": check.steps,
        "latents": check.latents,
        "captions": check.captions,
        "cache_bytes": check.cache_bytes,
        "sizes": [
            {"width": width, "height": height, "samples": count}
            for (width, height), count in check.samples.items()
        ],
        "without_caption": [look.name for look in found.without_caption],
        "long_captions": [look.name for look in found.long_captions(config.data.text_length)],
        "several_texts": {look.name: look.texts for look in found.several_texts},
        "enlarged": [_brief(look) | {"times": look.scale} for look in found.enlarged],
        "much_cropped": [_brief(look) | {"seen": look.seen} for look in found.much_cropped],
        "equal": [[look.name for look in group] for group in found.equal],
        "skipped": found.skipped,
        "left_out": dict(found.left_out),
        "contact_sheet": str(sheet),
    }


def _brief(look: Look) -> dict[str, Any]:
    return {"name": look.name, "width": look.width, "height": look.height}


def _by_folder(found: Inspection) -> dict[str, int]:
    """Return the samples of each folder of a data set config; empty if there is none."""
    counts = Counter[str]()
    for look in found.used:
        picture = look.picture
        counts[picture.label.removesuffix(picture.file.name)] += picture.repeats * len(look.sizes)
    counts.pop("", None)
    return dict(counts)


def _sizes(found: Inspection, config: RunConfig) -> str:
    areas = sorted(found.used, key=lambda look: look.width * look.height)
    ends = " to ".join(f"{look.width} x {look.height}" for look in (areas[0], areas[-1]))
    side = config.data.image_size
    trained = f"{side} x {side}" if config.data.buckets is None else "the sizes below"
    masks = sum(look.picture.mask_path is not None for look in found.used)
    return f"sizes: {ends} pixels; trained at {trained}" + f"; {masks} have masks" * bool(masks)


def _buckets(config: RunConfig, check: PictureCheck, names_all: bool) -> Iterator[str]:
    """Yield a line for each size, the most samples first; a size with less than a batch says so."""
    batch = config.schedule.global_batch_size
    most = len(check.samples) if names_all else _MAX_BUCKETS
    small = sum(count < batch for count in check.samples.values())
    fewer = f", {small} with fewer samples than a batch of {batch}" if small else ""
    yield f"{counted(len(check.samples), 'bucket')}{fewer}:"
    for (width, height), count in check.samples.most_common(most):
        batches, rest = divmod(count, batch)
        parts = [counted(batches, "batch", "batches")] if batches else []
        parts += [f"one of {rest}"] if rest else []
        yield f"  {width} x {height}: {counted(count, 'sample')}, {' and '.join(parts)}"
    if len(check.samples) > most:
        yield f"  … and {len(check.samples) - most} more (--all names them)"


def _captions(found: Inspection, length: int, most: int) -> Iterator[str]:
    title = "without a caption (data.class_tokens, else the empty prompt)"
    yield from _named(title, (look.name for look in found.without_caption), most)
    title = f"with captions of more words than the {length} tokens that T5 reads (data.text_length)"
    yield from _named(title, (look.name for look in found.long_captions(length)), most)
    names = (look.name for look in found.used if "[trigger]" in look.picture.caption)
    yield from _named("with [trigger], which is trained as it stands", names, most)
    lines = (f"{look.name}: {', '.join(look.texts)}" for look in found.several_texts)
    yield from _named("with several text files, of which one is used", lines, most)


def _files(found: Inspection, most: int) -> Iterator[str]:
    lines = (f"{_text(look)}, {look.scale:.3g} times" for look in found.enlarged)
    yield from _named("enlarged", lines, most)
    lines = (f"{_text(look)}, {look.seen:.0%} is seen" for look in found.much_cropped)
    yield from _named("cropped to less than 60 %", lines, most)
    lines = (" = ".join(look.name for look in group) for group in found.equal)
    yield from _named("of exact duplicates", lines, most, unit="group")
    lines = (f"{name}: {reason}" for name, reason in found.skipped.items())
    yield from _named("that cannot be used", lines, most, unit="file")
    lines = (f"{name}: {reason}" for name, reason in found.left_out.items())
    title = "left out, or of a similar name: thumbnails, hidden files and the like"
    yield from _named(title, lines, most, unit="entry", plural="entries")


def _text(look: Look) -> str:
    return f"{look.name}: {look.width} x {look.height}"


def _named(
    title: str, lines: Iterable[str], most: int, unit: str = "picture", plural: str = ""
) -> Iterator[str]:
    if not (listed := list(lines)):
        return
    yield f"{counted(len(listed), unit, plural)} {title}:"
    yield from (f"  {line}" for line in listed[:most])
    if len(listed) > most:
        yield f"  … and {len(listed) - most} more (--all names them)"


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=convert_data)
    parser.description = "Convert encoded samples to another layout."
    parser.epilog = (
        "Only the layout shards keeps captions; arrow, parquet and webdataset drop them."
    )
    layouts = get_args(Layout)
    parser.add_argument("source", type=path, metavar="SOURCE", help="folder of encoded samples")
    text = "folder to write; must not exist"
    parser.add_argument("target", type=path, metavar="TARGET", help=text)
    text = "layout of SOURCE (default: detected)"
    parser.add_argument("--from", dest="layout", choices=layouts, help=text)
    parser.add_argument("--to", required=True, choices=layouts, help="layout of TARGET (required)")
    text = "samples per file (default: 1024)"
    parser.add_argument("--shard-size", type=whole_number, default=1024, help=text)


def convert_data(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.shard_size <= 1_000_000:
        raise ConfigError("--shard-size", arguments.shard_size, "must be between 1 and 1000000")
    from fluxtrain.data.formats.convert import convert
    from fluxtrain.runtime.progress_bar import ProgressBar

    with ProgressBar("write and compare", is_shown=sys.stderr.isatty()) as bar:
        source, target, size = arguments.source, arguments.target, arguments.shard_size
        count = convert(source, target, arguments.to, arguments.layout, size, bar.advance)
    print(f"{arguments.target}: {count:,} samples as {arguments.to}, each compared after writing")
    return EXIT_OK
