"""What ``fluxtrain data check`` found, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.pictures.inspection import Inspection, Look
from fluxtrain.picture_cache.check import PictureCheck
from fluxtrain.plan.units import binary
from fluxtrain.redaction import redacted

_MAX_NAMED, _MAX_BUCKETS = 5, 20


def as_text(config: RunConfig, check: PictureCheck, names_all: bool) -> Iterator[str]:
    """Yield the lines of the report; of each kind the first files are named, or all."""
    found = check.inspection
    kinds = ", ".join(f"{count} {suffix[1:]}" for suffix, count in found.kinds().most_common())
    source = redacted(str(config.data.images))
    yield f"{source}: {_counted(len(found.used), 'picture')} can be used ({kinds})"
    yield from _folders(found)
    yield _sizes(found, config)
    yield from _training(config, check)
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


def _folders(found: Inspection) -> Iterator[str]:
    for folder, samples in _by_folder(found).items():
        yield f"  {folder}: {_counted(samples, 'sample')} in an epoch"


def _sizes(found: Inspection, config: RunConfig) -> str:
    areas = sorted(found.used, key=lambda look: look.width * look.height)
    ends = " to ".join(f"{look.width} x {look.height}" for look in (areas[0], areas[-1]))
    side = config.data.image_size
    trained = f"{side} x {side}" if config.data.buckets is None else "the sizes below"
    masks = sum(look.picture.mask_path is not None for look in found.used)
    return f"sizes: {ends} pixels; trained at {trained}" + f"; {masks} have masks" * bool(masks)


def _training(config: RunConfig, check: PictureCheck) -> Iterator[str]:
    schedule, samples = config.schedule, sum(check.samples.values())
    epochs = schedule.epochs or check.steps / check.steps_per_epoch
    yield (
        f"an epoch: {_counted(samples, 'sample')}, {check.steps_per_epoch:.4g} steps of "
        f"{schedule.global_batch_size}; the run: {check.steps:,} steps, {epochs:.4g} epochs"
    )
    if check.held_out:
        yield f"held out for the evaluation: {_counted(check.held_out, 'picture')}, at eight timesteps each"
    yield (
        f"to encode: {check.latents} latents and {check.captions} captions, the empty one too; "
        f"{binary(check.cache_bytes)}"
    )


def _buckets(config: RunConfig, check: PictureCheck, names_all: bool) -> Iterator[str]:
    """Yield a line for each size, the most samples first; a size with less than a batch says so."""
    batch = config.schedule.global_batch_size
    most = len(check.samples) if names_all else _MAX_BUCKETS
    small = sum(count < batch for count in check.samples.values())
    yield (
        f"{_counted(len(check.samples), 'bucket')}"
        + (f", {small} with fewer samples than a batch of {batch}" if small else "")
        + ":"
    )
    for (width, height), count in check.samples.most_common(most):
        batches, rest = divmod(count, batch)
        parts = [_counted(batches, "batch", "batches")] if batches else []
        parts += [f"one of {rest}"] if rest else []
        yield f"  {width} x {height}: {_counted(count, 'sample')}, {' and '.join(parts)}"
    if len(check.samples) > most:
        yield f"  … and {len(check.samples) - most} more (--all names them)"


def _captions(found: Inspection, length: int, most: int) -> Iterator[str]:
    title = "without a caption (data.class_tokens, else the empty prompt)"
    yield from _named(title, (look.name for look in found.without_caption), most)
    title = f"with captions of more words than the {length} tokens that T5 reads (data.text_length)"
    yield from _named(title, (look.name for look in found.long_captions(length)), most)
    lines = (f"{look.name}: {', '.join(look.texts)}" for look in found.several_texts)
    yield from _named("with several text files, of which one is used", lines, most)


def _files(found: Inspection, most: int) -> Iterator[str]:
    lines = (f"{_text(look)}, {look.scale:.1f} times" for look in found.enlarged)
    yield from _named("enlarged", lines, most)
    lines = (f"{_text(look)}, {look.seen:.0%} is seen" for look in found.much_cropped)
    yield from _named("cropped to less than 60 %", lines, most)
    lines = (" = ".join(look.name for look in group) for group in found.equal)
    yield from _named("equal to the byte", lines, most, unit="group")
    lines = (f"{name}: {reason}" for name, reason in found.skipped.items())
    yield from _named("that cannot be used", lines, most, unit="file")


def _text(look: Look) -> str:
    return f"{look.name}: {look.width} x {look.height}"


def _named(title: str, lines: Iterable[str], most: int, unit: str = "picture") -> Iterator[str]:
    listed = list(lines)
    if not listed:
        return
    yield f"{_counted(len(listed), unit)} {title}:"
    yield from (f"  {line}" for line in listed[:most])
    if len(listed) > most:
        yield f"  … and {len(listed) - most} more (--all names them)"


def _counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"
