"""What a run's cache of pictures lacks, and the data set that it is when it lacks nothing."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import PIXELS_PER_LATENT, DataConfig
from fluxtrain.data.dataset import EmptyText
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.dataset import (
    FILE,
    Entry,
    Latents,
    PictureCache,
    PictureDataset,
    Record,
    TrainingSample,
    TrainingSet,
    read_training_set,
)
from fluxtrain.data.pictures.encodings import LIKELY
from fluxtrain.data.pictures.faults import num_lost, unread_tables
from fluxtrain.data.pictures.folder import CAPTION_ENCODING, SIMILAR
from fluxtrain.data.pictures.picture import DECODER, variant_captions
from fluxtrain.data.pictures.subset import (
    REPEATS,
    Places,
    ReadPicture,
    TrainingPicture,
    find_pictures,
    held_out,
    notes,
    placements_of,
)
from fluxtrain.encode.encoders import check_files
from fluxtrain.encode.files import autoencoder_fingerprint, text_fingerprint
from fluxtrain.errors import DataError, JoinedDataError, one_line
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.progress import counted
from fluxtrain.runtime.progress_bar import ProgressBar
from fluxtrain.runtime.safetensors import read_header, read_tensor

REPORT = "pictures.json"
"""File of the run's output: which pictures are trained, and which are not and why."""
_MAX_NAMED = 10
_LIKELY = re.compile(rf", {LIKELY} (\S+)$")
_STALE_SECONDS = 600.0


@dataclass(frozen=True)
class CachedPictures:
    """The pictures of a run and their cache."""

    cache: PictureCache
    pictures: list[TrainingPicture]
    skipped: dict[str, str]
    """Files that are no pictures to train on, with the reason."""
    missing_pictures: list[TrainingPicture]
    missing_texts: list[str]
    stored: TrainingSet | None = None
    """The samples that the run began with; None if it begins."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Files and folders that are no pictures of the user's, with the reason."""

    def open(self, config: RunConfig, output: Path) -> OpenedPictures:
        """Return the data sets and the encodings of the empty prompt.

        A run that begins keeps its samples in ``output``, with a report, and names what is skipped on stderr.
        Raises DataError if `refused`, or if a picture that the run began with is neither in the cache nor in
        its folder.
        """
        found = self.stored or self._begin(config, output)
        entries = [self._entry(sample) for sample in found.samples]
        evaluated = [_evaluated(self._entry(sample)) for sample in found.validation]
        folder, verify = self.cache.folder, config.data.verify_checksums
        path = self.cache.text_path("")
        spans = read_header(path)
        return OpenedPictures(
            PictureDataset(folder, entries, verify),
            (read_tensor(path, spans["txt"]), read_tensor(path, spans["vec"])),
            PictureDataset(folder, evaluated, verify) if evaluated else None,
        )

    def _begin(self, config: RunConfig, output: Path) -> TrainingSet:
        found = [(picture, self._record(picture)) for picture in self.pictures]
        faults = {picture.label: record.fault for picture, record in found if record.fault}
        skipped = dict(sorted((self.skipped | faults).items()))
        used = [pair for pair in found if not pair[1].fault]
        if error := refused(config.data, (pair[0] for pair in used), skipped, output / REPORT):
            self.write_report(output, skipped, TrainingSet((), ()))
            raise error
        seed, part = config.drawn_seed, config.data.validation_split
        chosen = held_out((r.sha256 for p, r in used if not p.is_reg), part, seed)
        samples = list[TrainingSample](), list[TrainingSample]()
        for picture, record in used:
            is_held_out = record.sha256 in chosen
            if not (is_held_out and picture.is_reg):
                samples[is_held_out].extend(_samples(picture, record, seed))
        begun = TrainingSet(tuple(samples[0]), tuple(skipped), tuple(samples[1]))
        self.write_report(output, skipped, begun)
        for line in _lines(skipped, self.left_out, output / REPORT):
            print(line, file=sys.stderr, flush=True)
        begun.write(output)
        return begun

    def _entry(self, sample: TrainingSample) -> Entry:
        paths = tuple(map(self.cache.latents_path, sample.latents))
        masks = tuple(map(self.cache.mask_path, sample.masks))
        if self.stored is not None and not all(path.exists() for path in (*paths, *masks)):
            raise DataError(
                f"{sample.name}: changed since the run began, and its encodings of then are not in "
                f"{self.cache.folder}; restore the picture, or start again with another --output"
            )
        return Entry(
            sample.name,
            sample.captions,
            sample.repeats,
            paths,
            tuple(map(self.cache.text_path, sample.captions)),
            (sample.height // PIXELS_PER_LATENT, sample.width // PIXELS_PER_LATENT),
            masks,
            sample.weight,
        )

    def _record(self, picture: TrainingPicture) -> Record:
        record = self.cache.read_record(picture)
        if record is None:
            raise DataError(
                f"{self.cache.record_path(picture)}: was removed or damaged while the run started"
            )
        return record

    def write_report(self, output: Path, skipped: dict[str, str], found: TrainingSet) -> None:
        """Write what is used, skipped and left out to ``output``."""
        held_out = dict.fromkeys(sample.name for sample in found.validation)
        left_out = skipped.keys() | held_out.keys()
        used = [picture for picture in self.pictures if picture.label not in left_out]
        report = {
            "used": len(used),
            "samples": sum(picture.repeats for picture in used),
            "without_caption": [p.label for p in used if not p.file.caption],
            "held_out": list(held_out),
            "skipped": skipped,
            "left_out": dict(self.left_out),
        }
        text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
        with atomic_write(output / REPORT) as partial:
            partial.write_bytes(text.encode("utf-8", "backslashreplace"))


class OpenedPictures(NamedTuple):
    """The data sets of a run on pictures."""

    train: PictureDataset
    empty_text: EmptyText
    validation: PictureDataset | None = None
    """The pictures that are held out, each at all timesteps of the evaluation."""


def _evaluated(entry: Entry) -> Entry:
    """Return ``entry`` as the evaluation has it: its first variant, once for each timestep."""
    return replace(
        entry,
        repeats=REPEATS,
        captions=entry.captions[:1],
        texts=entry.texts[:1],
        latents=entry.latents[:1],
        masks=entry.masks[:1],
    )


def refused(
    data: DataConfig,
    pictures: Iterable[TrainingPicture],
    skipped: Mapping[str, str],
    report: Path | None = None,
) -> DataError | None:
    """Return the error of a run on ``pictures`` that has ``skipped`` too many, by ``max_skipped``.

    ``skipped`` has names with the reason, all of which ``report`` has. None if the run may begin.
    """
    used, lost, most = len({each.path for each in pictures}), num_lost(skipped), data.max_skipped
    if not used:
        return no_usable_images(skipped, report)
    if lost <= (most > 0) or lost / (used + lost) <= most:
        return None
    limit = f"more than the share of spec.run.data.max_skipped, {most:g}"
    begin = f"{lost} of {used + lost} pictures cannot be used, {limit}"
    return _refusal(begin, skipped, report, "raise spec.run.data.max_skipped")


def no_usable_images(skipped: Mapping[str, str], report: Path | None = None) -> DataError:
    """Return the error of a run of which all pictures are ``skipped``; ``report`` names all of them."""
    begin = f"none of the {num_lost(skipped) or len(skipped)} pictures can be used"
    return _refusal(begin, skipped, report)


def _refusal(begin: str, skipped: Mapping[str, str], report: Path | None, *last: str) -> DataError:
    first, *others = (f"{name}: {reason}" for name, reason in skipped.items())
    advice = " or ".join([", ".join(_advice(skipped)), *last])
    if not others:
        return DataError(f"{begin}; {first}; {advice}")
    return JoinedDataError([f"{begin}; {first}", *named(skipped, report)[1:], advice])


def _advice(skipped: Mapping[str, str]) -> list[str]:
    likely = Counter(match[1] for match in map(_LIKELY.search, skipped.values()) if match)
    if len(likely) == 1:
        return ["mend the files", f"set {CAPTION_ENCODING} to {next(iter(likely))}"]
    if likely or any(" is not UTF-8" in reason for reason in skipped.values()):
        return ["mend the files", f"set {CAPTION_ENCODING} to the codec of all captions"]
    return ["mend the files"]


def named(skipped: Mapping[str, str], report: Path | None) -> list[str]:
    """Return a line for each of the first files that are ``skipped``, and one for all; none if none are."""
    if not skipped:
        return []
    first = [f"skipped {name}: {reason}" for name, reason in islice(skipped.items(), _MAX_NAMED)]
    where = f"; {report} names all" if report else ""
    count = num_lost(skipped) or len(skipped)
    return [*first, f"{count} {'file is' if count == 1 else 'files are'} skipped{where}"]


def _lines(skipped: Mapping[str, str], left_out: Mapping[str, str], report: Path) -> Iterator[str]:
    yield from map(one_line, named(skipped, report))
    yield from unread_tables(left_out, _MAX_NAMED)
    if left_out:
        kinds = "thumbnails, hidden files and the like"
        similar = sum(SIMILAR in reason for reason in left_out.values())
        if similar:
            yield one_line(f"{similar} captions are of similar names; {report} names them")
        if len(left_out) > similar:
            number = len(left_out) - similar
            yield one_line(f"{number} {kinds} are left out; {report} names them")


def find_work(
    config: RunConfig, paths: RunPaths, is_new: bool = True, places: Places | None = None
) -> CachedPictures:
    """Return the run's pictures, and what is not encoded yet; ``places`` has the folders of URLs.

    Faults of earlier starts are looked at again. A run that is not ``is_new`` has the samples that it began
    with. Raises DataError if there are no pictures, too many are skipped, or the encoders are missing.
    """
    stored = None if is_new else read_training_set(paths.output)
    pictures, skipped, left_out = find_pictures(config, paths.data, places or {})
    for note in notes(config.data, paths.data, config.schedule.global_batch_size):
        print(f"fluxtrain: {note}", file=sys.stderr, flush=True)
    check_files(config.encoders, paths.models)
    cache = open_cache(config, paths)
    cache.make_folders()
    for path in cache.folder.glob("*/.*.partial"):  # of killed processes
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
    existing = cache.existing()
    if stored is not None:
        return _continued(stored, pictures, cache, existing)
    if error := refused(config.data, pictures, skipped, paths.output / REPORT):
        found = CachedPictures(cache, pictures, skipped, [], [], left_out=left_out)
        found.write_report(paths.output, skipped, TrainingSet((), ()))
        raise error
    done = existing.__contains__
    missing = [picture for picture in pictures if not is_done(config, cache, picture, done)]
    for picture in missing:
        if picture.is_streamed:  # it was encoded a moment ago, and it is not here any more
            text = f"{picture.label}: its encodings were removed or damaged while the run started"
            raise DataError(f"{text}; the same command encodes them again")
        cache.record_path(picture).unlink(missing_ok=True)
    seed = config.drawn_seed
    every = (variant_captions(p.caption, p.variants, seed) for p in pictures)
    captions = dict.fromkeys([*(text for texts in every for text in texts), ""])
    texts = _missing_texts(captions, cache, existing)
    return CachedPictures(cache, pictures, skipped, missing, texts, left_out=left_out)


def _continued(
    stored: TrainingSet, pictures: list[TrainingPicture], cache: PictureCache, existing: set[str]
) -> CachedPictures:
    """Return what a run that goes on lacks of its ``stored`` samples; tell what changed in the folder."""
    if mended := sum(1 for _ in _mended(stored, pictures, cache)):
        text = f"{mended} of those that were skipped are mended since the run began, and stay out of it"
        print(f"fluxtrain: pictures: {text}", file=sys.stderr, flush=True)
    if changes := stored.changes(pictures):
        print(
            f"fluxtrain: pictures: {changes} since the run began, which continues with its own "
            f"{len(stored.samples)} ({FILE}); use another --output to train on the new ones",
            file=sys.stderr,
            flush=True,
        )
    lacking = {
        sample.name
        for sample in stored.every
        if not cache.files_of(sample.latents, sample.masks) <= existing
    }
    missing = [p for p in pictures if p.label in lacking and not p.is_streamed]
    if lost := sorted(lacking - {picture.label for picture in missing}):
        raise DataError(
            f"{lost[0]}: missing, and so are its encodings in {cache.folder}; the run began with it: "
            "restore it, or start again with another --output"
        )
    for picture in missing:
        cache.record_path(picture).unlink(missing_ok=True)
    captions = dict.fromkeys([*(text for each in stored.every for text in each.captions), ""])
    texts = _missing_texts(captions, cache, existing)
    names = {sample.name for sample in stored.every}
    used = [picture for picture in pictures if picture.label in names]
    return CachedPictures(cache, used, {}, missing, texts, stored)


def _mended(
    stored: TrainingSet, pictures: list[TrainingPicture], cache: PictureCache
) -> Iterator[str]:
    """Yield the names of ``pictures`` that were skipped when the run began and are others now."""
    skipped = set(stored.skipped)
    for picture in pictures:
        if picture.label in skipped:
            record = cache.read_record(picture)
            if record is None or not record.fault:
                yield picture.label


def _missing_texts(captions: Iterable[str], cache: PictureCache, existing: set[str]) -> list[str]:
    return [text for text in captions if str(cache.text_path(text)) not in existing]


def is_done(
    config: RunConfig,
    cache: PictureCache,
    picture: TrainingPicture,
    exists: Callable[[str], bool],
) -> bool:
    """Return whether the latents of ``picture`` exist at all sizes that ``config`` asks for.

    ``exists`` is asked for paths of the cache. A streamed picture is also done if it has a fault: its bytes
    stay what they are.
    """
    record = cache.read_record(picture)
    if record is None or record.fault:
        return record is not None and picture.is_streamed
    wanted = [each for each, _ in required_latents(config, cache, picture, record)]
    masks = (each.mask for each in wanted if each.mask)
    files = cache.files_of((each.id for each in wanted), masks)
    return wanted == list(record.latents) and all(map(exists, files))


def required_latents(
    config: RunConfig, cache: PictureCache, picture: TrainingPicture, read: Record | ReadPicture
) -> list[tuple[Latents, Placement]]:
    """Return all latents of ``picture``, which is known by what was ``read``, with how it is placed for them.

    Raises PictureError if it is too small for any bucket.
    """
    sha256, mask_sha256 = read.sha256, read.mask_sha256
    places = placements_of(picture, config.data, config.drawn_seed, read.width, read.height, sha256)

    def latents(placement: Placement, number: int) -> Latents:
        mask = cache.mask_id(picture.mask_kind, mask_sha256, placement) if mask_sha256 else ""
        return Latents(cache.latents_id(sha256, placement), *placement.size, number, mask)

    return [(latents(each, number), each) for number, each in places]


def _samples(picture: TrainingPicture, record: Record, seed: int) -> Iterator[TrainingSample]:
    """Yield the samples of ``picture``, one for each size, whose variants are trained in turn."""
    captions = variant_captions(picture.caption, picture.variants, seed)
    for _, group in groupby(record.latents, lambda latents: latents.sample):
        variants = list(group)
        yield TrainingSample(
            picture.label,
            captions,
            picture.repeats,
            tuple(latents.id for latents in variants),
            variants[0].width,
            variants[0].height,
            picture.caption,
            tuple(latents.mask for latents in variants if latents.mask),
            picture.weight,
        )


def open_cache(config: RunConfig, paths: RunPaths) -> PictureCache:
    """Return the cache of the run, whose IDs say which encoders made them."""
    encoders, data = config.encoders, config.data
    folder = paths.output / "cache" if data.cache is None else paths.data / data.cache
    weights = autoencoder_fingerprint(encoders, paths.models)
    images = [DECODER, encoders.autoencoder_kind, encoders.precision, weights]
    if (takes := config.model.takes) is not None:
        is_drawn = takes.has_hole and data.controls is None
        images += [config.model.condition, str(config.drawn_seed) if is_drawn else ""]
    weights = text_fingerprint(encoders, paths.models)
    texts = [encoders.text, encoders.precision, data.text_length, weights]
    buckets = None if data.buckets is None else data.buckets.model_dump()
    has_crops = data.variants is not None and data.variants.crops > 1
    sizes = [data.image_size, buckets, config.drawn_seed if has_crops else None]
    return PictureCache(folder, json.dumps(images), json.dumps(texts), json.dumps(sizes))


def encoding_bar(is_shown: bool, work: CachedPictures) -> ProgressBar:
    """Return the bar of the pictures and captions to encode; print what there is to do."""
    if is_shown:
        print(_summary(work), file=sys.stderr, flush=True)
    total = len(work.missing_pictures) + len(work.missing_texts)
    return ProgressBar("encode", total, is_shown=is_shown)


def _summary(work: CachedPictures) -> str:
    samples = work.pictures if work.stored is None else work.stored.samples
    pictures, texts = len(work.missing_pictures), len(work.missing_texts)
    captions = sum(1 for sample in samples if not sample.caption)
    held_out = () if work.stored is None else work.stored.validation
    return (
        f"{counted(len(samples), 'picture')}, "
        f"{counted(sum(each.repeats for each in samples), 'sample')} in an epoch"
        + f", {captions} without caption" * bool(captions)
        + f", {len(held_out)} held out" * bool(held_out)
        + f", {counted(num_lost(work.skipped), 'file')} skipped" * bool(work.skipped)
        + f" · {counted(pictures, 'picture')} and {counted(texts, 'caption')} to encode in "
        + str(work.cache.folder)
    )
