"""``fluxtrain export``, ``import``, ``adapter`` and ``push``: weights and LoRA files for other tools."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fluxtrain.cli.arguments import (
    add_adapters,
    add_command,
    add_output,
    add_paths,
    add_skip_unknown,
    path,
    strength,
    strength_of,
    whole_number,
)
from fluxtrain.errors import EXIT_OK, ConfigError, DataError, one_line
from fluxtrain.runtime.progress import counted

if TYPE_CHECKING:
    from fluxtrain.adapter.file import AdapterFile
    from fluxtrain.adapter.updates import Adapter
    from fluxtrain.weights import Weights


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=export)
    parser.description = (
        "Write the weights of a run, a checkpoint or a published model in a published layout."
    )
    text = "run, checkpoint, weights file or diffusers folder"
    parser.add_argument("source", type=path, metavar="SOURCE", help=text)
    text = "bfl (one file, default) or diffusers (a folder)"
    parser.add_argument("--to", default="bfl", help=text)
    add_adapters(parser)
    add_paths(parser, ("models",))
    add_target(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    add_output(parser, "file or folder to write (required)")
    text = "bfloat16 (default), float16 or float32"
    parser.add_argument("--dtype", default="bfloat16", help=text)


def export(arguments: argparse.Namespace) -> int:
    from fluxtrain.adapter.merge import MergedWeights
    from fluxtrain.adapter.opening import open_adapter, open_model

    _check_weights_target(arguments)
    strength = strength_of(arguments)
    weights = open_model(arguments.source, arguments.models)
    if arguments.adapter:
        skip = arguments.skip_unknown
        added = [(open_adapter(each, skip), strength) for each in arguments.adapter]
        weights = MergedWeights(weights, added)
    print(f"{_write_weights(arguments, weights)}, read again and compared")
    return EXIT_OK


def _write_weights(arguments: argparse.Namespace, weights: Weights) -> str:
    """Write ``weights``, and print what of adapters is not in them; return what was written."""
    from fluxtrain.adapter.merge import left_out, skipped
    from fluxtrain.runtime.progress_bar import ProgressBar
    from fluxtrain.weights.writer import DTYPES, write_weights

    for text in filter(None, (*skipped(weights), left_out(weights))):
        print(one_line(text))
    dtype, output = DTYPES[arguments.dtype], arguments.output
    with ProgressBar(str(output), unit="B") as bar:
        written = write_weights(weights, output, arguments.to, dtype, report_bytes=bar.advance)
    return f"{output}: {written // dtype.itemsize:,} parameters, {written:,} bytes"


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=export)
    parser.description = (
        "Convert published weights to the single file that spec.run.initial_weights names."
    )
    text = "BFL's file or a diffusers folder"
    parser.add_argument("source", type=path, metavar="SOURCE", help=text)
    parser.set_defaults(to="bfl", adapter=[], strength=None, skip_unknown=False, models=Path())
    add_target(parser)


_SOURCE = "LoRA file of any dialect, or a run or checkpoint with adapters"


def add(parser: argparse.ArgumentParser) -> None:
    inner = parser.add_subparsers(dest="adapter_command", required=True, metavar="COMMAND")
    convert = add_command(inner, "convert", _convert, help="write a LoRA in another layout or type")
    convert.add_argument("source", type=path, metavar="SOURCE", help=_SOURCE)
    add_skip_unknown(convert)
    _add_file(convert)
    merge = add_command(inner, "merge", _merge, help="add LoRAs to a model's weights")
    text = "weights file, diffusers folder, run or checkpoint"
    merge.add_argument("weights", type=path, metavar="WEIGHTS", help=text)
    merge.add_argument("sources", type=path, nargs="+", metavar="SOURCE", help=_SOURCE)
    add_skip_unknown(merge)
    merge.add_argument("--strength", type=strength, default=1.0, help="factor (default: 1)")
    merge.add_argument("--to", default="bfl", help="bfl (one file, default) or diffusers")
    add_target(merge)
    extract = add_command(inner, "extract", _extract, help="make a LoRA of two models' difference")
    extract.add_argument("base", type=path, metavar="BASE", help=text)
    extract.add_argument("tuned", type=path, metavar="TUNED", help="the same model, trained")
    _add_rank(extract)
    _add_file(extract)
    info = add_command(
        inner, "info", _info, help="print what a LoRA or another safetensors file holds"
    )
    info.add_argument("source", type=path, metavar="SOURCE", help=_SOURCE)
    resize = add_command(inner, "resize", _resize, help="write the closest LoRA of another rank")
    resize.add_argument("source", type=path, metavar="SOURCE", help=_SOURCE)
    add_skip_unknown(resize)
    _add_rank(resize)
    _add_file(resize)


def _add_rank(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=whole_number, required=True, help="largest rank (required)")


def _add_file(parser: argparse.ArgumentParser) -> None:
    text = "kohya (default), diffusers, ai-toolkit or bfl"
    parser.add_argument("--to", default="kohya", help=text)
    text = "bfloat16, float16 or float32 (default: the source's; bfloat16 of a run or of models)"
    parser.add_argument("--dtype", help=text)
    text = "file to write, *.safetensors (required)"
    parser.add_argument("--output", type=path, required=True, help=text)


def _convert(arguments: argparse.Namespace) -> int:
    file = _open(arguments)
    return _write(arguments, file.adapter, file)


def _resize(arguments: argparse.Namespace) -> int:
    from fluxtrain.adapter.updates import is_dora, low_rank

    file = _open(arguments)
    if is_dora(file.adapter):
        text = "its magnitudes (DoRA) belong to updates of their own rank; merge it, and extract a LoRA"
        raise DataError(f"{file.path}: {text}")
    adapter: Adapter = {}
    squares = rest = 0.0
    for layer, update in file.adapter.items():
        try:
            adapter[layer] = update.resized(arguments.rank)
        except RuntimeError as error:  # torch.linalg.LinAlgError is one
            raise DataError(f"{file.path}: {layer}: {one_line(str(error))}") from None
        before = update.delta()
        squares += before.square().sum().item()
        rest += (before - adapter[layer].delta()).square().sum().item()
    print(
        f"rank {arguments.rank} keeps {1 - rest / max(squares, 1e-30):.2%} of the squared updates"
    )
    ranks = [update.rank for update in low_rank(adapter).values() if update.rank < arguments.rank]
    if ranks:
        kept = ", ".join(map(str, sorted(set(ranks))))
        count = f"{len(ranks)} of {len(adapter)} layers"
        print(f"{count} keep their smaller rank ({kept}): a larger one only adds zeros")
    return _write(arguments, adapter, file)


def _extract(arguments: argparse.Namespace) -> int:
    from fluxtrain.adapter.merge import extract
    from fluxtrain.runtime.progress_bar import ProgressBar
    from fluxtrain.weights import open_weights

    _check_target(arguments)
    base, tuned = open_weights(arguments.base), open_weights(arguments.tuned)
    with ProgressBar("extract", len(base.shapes)) as bar:
        found = extract(base, tuned, arguments.rank, lambda: bar.advance(1))
    print(f"rank {arguments.rank} keeps {found.kept:.2%} of the squared differences")
    if found.left_out:
        is_one = found.left_out == 1
        text, them = ("tensor differs", "it") if is_one else ("tensors differ", "them")
        print(f"{found.left_out} other {text} too; a LoRA of the blocks cannot hold {them}")
    return _write(arguments, found.adapter, None, base.model.guidance_embed)


def _merge(arguments: argparse.Namespace) -> int:
    from fluxtrain.adapter.merge import MergedWeights
    from fluxtrain.adapter.opening import open_adapter
    from fluxtrain.weights import open_weights

    _check_weights_target(arguments)
    files = [open_adapter(source, arguments.skip_unknown) for source in arguments.sources]
    for file in files:
        _print_ignored(file)
    added = [(file, arguments.strength) for file in files]
    print(_write_weights(arguments, MergedWeights(open_weights(arguments.weights), added)))
    return EXIT_OK


def _info(arguments: argparse.Namespace) -> int:
    from fluxtrain.adapter.file import describe, describe_file
    from fluxtrain.adapter.opening import open_adapter

    source = arguments.source
    for name, value in describe(open_adapter(source)) if source.is_dir() else describe_file(source):
        print(one_line(f"{name + ':':<14} {value}"))
    return EXIT_OK


def _open(arguments: argparse.Namespace) -> AdapterFile:
    """Return the source, if the target can be written, and print what of it is left out."""
    from fluxtrain.adapter.opening import open_adapter

    _check_target(arguments)
    file = open_adapter(arguments.source, arguments.skip_unknown)
    _print_ignored(file)
    if file.skipped:
        print(file.skipped)
    return file


def _write(
    arguments: argparse.Namespace,
    adapter: Adapter,
    source: AdapterFile | None,
    is_dev: bool | None = None,
) -> int:
    from fluxtrain.adapter.file import DTYPES, kept, readers, write_adapter

    is_file = source is not None and source.path.is_file()
    own = {dtype: name for name, dtype in DTYPES.items()}
    name = arguments.dtype or (own.get(source.dtype) if source and is_file else None) or "bfloat16"
    given = kept(source.metadata) if source else {}
    if source and adapter is not source.adapter:
        given = {key: value for key, value in given.items() if "ss_network_" not in key}
    size = write_adapter(arguments.output, adapter, arguments.to, DTYPES[name], given, is_dev)
    print(f"{arguments.output}: {len(adapter)} layers, {arguments.to}, {name}, {size:,} bytes")
    print(f"read by {readers(adapter, arguments.to)}")
    return EXIT_OK


def _check_target(arguments: argparse.Namespace) -> None:
    """Raise ConfigError, before anything is read, for a target that cannot be written."""
    from fluxtrain.adapter.file import DTYPES, LAYOUTS

    _require("--to", arguments.to, LAYOUTS)
    if arguments.dtype is not None:
        _require("--dtype", arguments.dtype, DTYPES)
    if "rank" in arguments and not 1 <= arguments.rank <= 1024:
        raise ConfigError("--rank", arguments.rank, "must be between 1 and 1024")
    _check_output(arguments.output)


def _check_weights_target(arguments: argparse.Namespace) -> None:
    """Raise ConfigError, before anything is read, for weights that cannot be written."""
    from fluxtrain.weights.writer import DTYPES, LAYOUTS

    _require("--to", arguments.to, LAYOUTS)
    _require("--dtype", arguments.dtype, DTYPES)
    _check_output(arguments.output, is_folder=arguments.to == "diffusers")


def _check_output(output: Path, is_folder: bool = False) -> None:
    if is_folder == (output.suffix == ".safetensors"):
        text = "is a folder with --to=diffusers: name it without .safetensors"
        text = text if is_folder else "must end in .safetensors"
        raise ConfigError("--output", str(output), text)
    if output.exists():
        raise ConfigError("--output", str(output), "exists already; remove it or name another")


def _require(option: str, value: str, allowed: object) -> None:
    names = list(allowed)  # type: ignore[call-overload]
    if value not in names:
        raise ConfigError(option, value, f"must be one of {', '.join(names)}")


def _print_ignored(file: AdapterFile) -> None:
    if file.left_out:
        print(one_line(f"{file.path}: {file.left_out} are left out"))


def add_push(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=_push)
    parser.description = (
        "Publish the LoRA of a run at the Hugging Face Hub: private, with samples and a model card."
    )
    parser.add_argument("run", type=path, metavar="RUN", help="output folder of the run")
    parser.add_argument("repo", metavar="REPO", help="OWNER/NAME at the Hub, made if it is missing")
    text = "let all see it (default: only you)"
    parser.add_argument("--public", action="store_true", help=text)
    text = "word that makes its pictures (default: data.caption_prefix)"
    parser.add_argument("--trigger", metavar="WORD", help=text)
    text = "write the card to RUN/README.md to look at, and send nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)


def _push(arguments: argparse.Namespace) -> int:
    from fluxtrain.adapter.publish import CARD_FILE, Publication, push
    from fluxtrain.runtime.files import atomic_write_by_several

    run = arguments.run
    found = Publication.of(run)
    card = found.card(arguments.repo, arguments.trigger)
    if arguments.dry_run:
        if (run / CARD_FILE).exists() and (run / CARD_FILE).read_text("utf-8", "replace") != card:
            raise ConfigError("--dry-run", str(run / CARD_FILE), "is another card; remove it first")
        with atomic_write_by_several(run / CARD_FILE) as partial:
            partial.write_text(card, encoding="utf-8")
        names = ", ".join([CARD_FILE, *found.files()])
        print(f"{run / CARD_FILE}: the card; nothing was sent. Without --dry-run: {names}")
        return EXIT_OK
    address = push(found.files(), card, arguments.repo, arguments.public)
    print(f"{address}: {found.file}, {counted(len(found.images), 'sample')} and the card")
    return EXIT_OK
