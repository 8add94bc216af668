"""T5, CLIP and the autoencoder below the models root, as the presets name them.

    MODELS/t5/                          config, weights, tokenizer
    MODELS/clip/                        the same
    MODELS/autoencoder/ae.safetensors
    MODELS/encoders.json                size and SHA-256 of every file

An encoder appears when all of it is there and its tensors, shapes and tokenizer are those of its config.

It comes from a folder, a manifest of MLCommons, or a model on the Hub at one commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, cast

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.data import is_url, url_fault
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.encode.codec import load_autoencoder
from fluxtrain.encode.encoders import missing_models, wanted_models
from fluxtrain.encode.files import Kind, check_text_folder
from fluxtrain.errors import ConfigError, DataError, redacted
from fluxtrain.fetch.http import DownloadError, ExhaustedError, HttpClient, RetryPolicy
from fluxtrain.fetch.source import Source, fetch_source, open_store
from fluxtrain.fetch.stores import HttpStore, NothingThereError, RefusedError, RemoteFile
from fluxtrain.prepare.download import download, hub_errors
from fluxtrain.runtime.files import atomic_write, exclusive_lock, storage_errors
from fluxtrain.runtime.progress_bar import ProgressBar
from fluxtrain.runtime.safetensors import ALL_DTYPES, read_header

AUTOENCODER = "ae.safetensors"
_TOKENIZER = "tokenizer_config.json"
_TEXT_FILES = ("*.json", "*.safetensors", "*.model", "*.txt")
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "t5": _TEXT_FILES,
    "clip": _TEXT_FILES,
    "autoencoder": (AUTOENCODER,),
}
"""The files of each encoder; a folder in transformers' format may have others, such as pickles."""
PUBLISHED: Mapping[str, tuple[str, ...]] = {
    "t5": ("text_encoder_2", "tokenizer_2"),
    "clip": ("text_encoder", "tokenizer"),
    "autoencoder": ("",),
}
"""Folders of each encoder in FLUX.1 as it is published."""


def prepare_encoders(
    wanted: Mapping[str, Sequence[EncoderSource]], models: Path, force: bool = False
) -> None:
    """Collect the ``wanted`` encoders from their places and verify them; verify those that are there.

    ``force`` collects them again. Raises DataError if one is not whole, is another model's, or differs from
    the record; DownloadError if it cannot be downloaded, StorageError if it cannot be written.
    """
    with _locked(models, 0.0):
        _prepare(wanted, models, force)
        _remove_downloads(models)


@contextmanager
def _locked(models: Path, wait_seconds: float) -> Iterator[None]:
    with storage_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(models, wait_seconds=wait_seconds):
            yield


def _prepare(wanted: Mapping[str, Sequence[EncoderSource]], models: Path, force: bool) -> None:
    for name, places in wanted.items():
        folder = models / name
        if force or not folder.is_dir() or not any(folder.iterdir()):
            text = _collect(name, places, models)
        else:
            hint = "; fluxtrain prepare encoders --force collects it anew"
            text = _verify(name, folder, models, hint)
        print(f"{folder}: {text}", file=sys.stderr, flush=True)


def _remove_downloads(models: Path) -> None:
    for downloaded in models.glob(".*.download"):
        shutil.rmtree(downloaded)


_PUBLISHER = "hf://black-forest-labs"
_SINGLE_FILES = "hf://comfyanonymous/flux_text_encoders"
"""The text encoders as ComfyUI and kohya's sd-scripts read them."""
_NAMES = {"flux_dev.safetensors": "flux1-dev.safetensors", "flux_ae.safetensors": AUTOENCODER}
"""Names that guides give to files of the publisher."""


def published_place(model: ModelConfig) -> str:
    """Return where FLUX.1 is published: with the condition of ``model``, or its input for the guidance."""
    plain = f"FLUX.1-{'dev' if model.guidance_embed else 'schnell'}"
    return f"{_PUBLISHER}/{model.takes.repository if model.takes else plain}"


def fetch_models(
    config: RunConfig, models: Path, published: str | None = None, wait_seconds: float = 0.0
) -> list[str]:
    """Fetch what a run of ``config`` misses below ``models``; return what ``published`` does not have of it.

    ``published`` is a place in the layout of FLUX.1's publisher, by default that on the Hub; text encoders of
    one file come from it too, by default from a repository of their own. Another process that fetches is
    waited for. Raises what `prepare_encoders` does.
    """
    for name in wanted_models(config):
        if (models / name).is_file() and (fault := _fault_of(models / name)):
            raise DataError(f"{models / name}: {fault}; remove it, and the same command fetches it")
    if not missing_models(config, models):
        return []
    with _locked(models, wait_seconds):
        missing, scratch = missing_models(config, models), models / ".published.download"
        place = parse_source(published or published_place(config.model), scratch, "--from")
        texts = place if published else parse_source(_SINGLE_FILES, scratch, "--from")
        encoders = config.encoders
        for given, source in (
            (config.initial_weights, place), (encoders.autoencoder, place),
            (encoders.t5, texts), (encoders.clip, texts),
        ):  # fmt: skip
            is_file = given in missing and str(given).endswith(".safetensors")
            if is_file and str(given) != f"autoencoder/{AUTOENCODER}":
                target = models / str(given)
                names = dict.fromkeys((target.name, _NAMES.get(target.name, target.name)))
                _fetch_to(target, source, (*names,))
        tokenizers = {encoders.t5_tokenizer: "tokenizer_2", encoders.clip_tokenizer: "tokenizer"}
        for tokenizer, folder in tokenizers.items():
            if f"{tokenizer}/{_TOKENIZER}" in missing:
                _fetch_to(models / str(tokenizer), place.below(folder), _TEXT_FILES)
        folders = {name.partition("/")[0] for name in missing}
        for name in (name for name in PUBLISHED if name in folders):
            try:
                places = [place.below(folder) for folder in PUBLISHED[name]]
                _prepare({name: places}, models, force=False)
            except NotThereError as error:
                print(error, file=sys.stderr, flush=True)
        _remove_downloads(models)
    return missing_models(config, models)


def _fetch_to(target: Path, place: EncoderSource, patterns: tuple[str, ...]) -> None:
    """Fetch the file ``target``, by one of its names, or a tokenizer's folder, whose config comes last."""
    is_file = target.suffix == ".safetensors"
    last = target.name if is_file else _TOKENIZER
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        place.copy(patterns, partial)
        for path in partial.iterdir():
            if fault := _fault_of(path):
                raise DataError(f"{place.text}: {path.name}: {fault}")
        if not is_file:
            target.mkdir(exist_ok=True)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == last):
            path.replace(target if is_file else target / path.name)
        print(f"{target}: from {place.text}", file=sys.stderr, flush=True)
    except NotThereError as error:  # in the end all that is missing is told
        print(error, file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(partial)


def _collect(name: str, places: Sequence[EncoderSource], models: Path) -> str:
    """Copy the files of ``name`` to a partial folder, verify it, put it in its place; return what it is."""
    partial = models / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for place in places:
        place.copy(PATTERNS[name], partial)
    text = _verify(name, partial, models)
    shutil.rmtree(models / name, ignore_errors=True)
    partial.replace(models / name)
    return text


def _verify(name: str, folder: Path, models: Path, hint: str = "") -> str:
    """Return what is in ``folder``; raise DataError unless it is whole, and as recorded if it was.

    ``hint`` follows an error about what is not whole.
    """
    try:
        text = _describe(name, folder)
    except DataError as error:
        raise DataError(f"{error}{hint}") from None
    known = compare_or_record(models, name, sums_of(folder))
    return f"{text}; checksums {'as recorded before' if known else 'recorded'}"


def _describe(name: str, folder: Path) -> str:
    """Return what is in ``folder`` in one line; raise DataError unless it is the whole encoder ``name``."""
    if name in ("t5", "clip"):
        return check_text_folder(folder, cast(Kind, name))
    path = folder / AUTOENCODER
    if not path.is_file():
        raise DataError(f"{path}: missing")
    state = load_autoencoder(path).state_dict()
    return f"{sum(tensor.numel() for tensor in state.values()):,} parameters, {len(state)} tensors"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class HubFile:
    """A file of the model: its path, size in bytes, and either the SHA-256 or git's hash of its content."""

    path: str
    size: int | None
    sha256: str | None
    git_sha1: str | None

    def require_content(self, path: Path) -> None:
        """Raise DataError unless ``path`` has the size and hash that the Hub tells."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            raise DataError(f"{path}: {size} bytes, on the Hub {self.size}")
        as_git = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        with path.open("rb") as file:
            found = hashlib.file_digest(
                file, "sha256" if self.sha256 else lambda: as_git
            ).hexdigest()
        expected = self.sha256 or self.git_sha1
        if expected is not None and found != expected:
            raise DataError(f"{path}: its hash is {found}, on the Hub {expected}")


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub, at one commit."""

    name: str
    commit: str
    files: tuple[HubFile, ...]
    scratch: Path
    """Where downloads grow; they resume there."""

    def copy(self, folder: str, patterns: tuple[str, ...], target: Path) -> None:
        from huggingface_hub import hf_hub_download

        for file in self.files:
            path = PurePosixPath(file.path)
            parent = "" if str(path.parent) == "." else str(path.parent)
            if parent != folder or not _matches(path.name, patterns):
                continue
            with hub_errors(self.name):
                local = Path(
                    hf_hub_download(
                        self.name, file.path, revision=self.commit, local_dir=self.scratch
                    )
                )
            try:
                file.require_content(local)
            except DataError as error:
                local.unlink()
                raise DataError(f"{error}; the same command fetches it again") from None
            os.link(local, target / path.name)


def open_hub_model(name: str, revision: str, scratch: Path) -> HubModel:
    """Return the model ``ORG/NAME`` at the current commit of ``revision``; it is downloaded to ``scratch``.

    Raises DownloadError if the Hub cannot be reached, DataError if it has no such model for this token.
    """
    with hub_errors(name):
        from huggingface_hub import HfApi

        info = HfApi().model_info(name, revision=revision, files_metadata=True)
    files = tuple(
        HubFile(each.rfilename, each.size, each.lfs.sha256 if each.lfs else None, each.blob_id)
        for each in info.siblings or ()
    )
    return HubModel(name, info.sha or revision, files, scratch)


HUB = "hf://"
_HUB_NAME = re.compile(
    r"hf://(?P<name>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w.-]+))?(?:/(?P<folder>[\w./-]+?))?/?"
)
_ALLOWED = (
    "a folder, a manifest that ends in .md5 or .uri, hf://ORG/NAME[@REVISION][/FOLDER], or a folder at "
    "s3://BUCKET, gs://BUCKET, az://CONTAINER or https://HOST/"
)


class Base(Protocol):
    """Something that has files in folders."""

    def copy(self, folder: str, patterns: tuple[str, ...], target: Path) -> None:
        """Copy the files directly in ``folder`` that match one of ``patterns`` to ``target``.

        Raises DownloadError or DataError.
        """


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine, or of a volume."""

    path: Path

    def copy(self, folder: str, patterns: tuple[str, ...], target: Path) -> None:
        source = self.path / folder
        for path in sorted(source.iterdir()) if source.is_dir() else ():
            if path.is_file() and _matches(path.name, patterns):
                shutil.copyfile(path, target / path.name)


_INDEX = "model.safetensors.index.json"
_KNOWN_NAMES = (
    *("config.json", "model.safetensors", "tokenizer.json", _TOKENIZER, "spiece.model"),
    *("special_tokens_map.json", "vocab.json", "merges.txt", _INDEX),
)
"""Files of text encoders and tokenizers, asked for one by one where no folder can be listed."""


@dataclass(frozen=True)
class StoreFolder:
    """A folder of a bucket or of a web server."""

    url: str
    scratch: Path
    """Where downloads grow, in folders by their versions; they resume there."""

    def copy(self, folder: str, patterns: tuple[str, ...], target: Path) -> None:
        url, policy = f"{self.url}/{folder}".rstrip("/"), RetryPolicy()
        try:
            source = policy.tried(lambda: self._listed(url, patterns))
        except RefusedError as error:
            raise DataError(f"{redacted(url)}: {error}") from None
        except ExhaustedError as error:
            raise DownloadError(f"{redacted(url)}: {error}; the same command resumes") from None
        if not source.files:
            return
        place = self.scratch / source.key
        with ProgressBar(f"fetch {source}", source.size, unit="B") as bar:
            fetch_source(source, place, _CONNECTIONS, policy, bar.advance)
        for file in source.files:
            if fault := _fault_of(place / file.name):
                (place / file.name).unlink()
                raise DataError(f"{redacted(url)}/{file.name}: {fault}")
        for file in source.files:
            os.utime(place / file.name)
            os.link(place / file.name, target / file.name)

    def _listed(self, url: str, patterns: tuple[str, ...]) -> Source:
        if not url.startswith(("http://", "https://")):
            found = open_store(url)[0].files()
            direct = [it for it in found if _matches(it.name, patterns) and "/" not in it.name]
            return Source("--from", url, url, tuple(direct))
        exact = [name for name in patterns if "*" not in name]
        names = [*exact, *(_KNOWN_NAMES if len(exact) < len(patterns) else ())]
        files = _there(url, dict.fromkeys(names))
        if any(file.name == _INDEX for file in files):
            try:
                index = json.loads(HttpClient().read_small(f"{url}/{_INDEX}"))
                names = [str(name) for name in index["weight_map"].values()]
            except (ValueError, LookupError, TypeError, AttributeError):
                raise DataError(f"{redacted(url)}/{_INDEX}: {_NO_JSON}") from None
            files += _there(url, dict.fromkeys(names))
        named = ",".join(file.name for file in files)
        shown = f"{{{named}}}" if len(files) > 1 else named
        return Source("--from", url, f"{url}/{shown}", tuple(files))


_CONNECTIONS = 4
_NO_JSON = "not the JSON of a model; a page that asks for a login has such contents too"


def _fault_of(path: Path) -> str:
    """Return why ``path`` is not what its suffix says, "" if it is."""
    try:
        if path.suffix == ".safetensors":
            read_header(path, ALL_DTYPES)
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
    except DataError as error:
        return str(error).removeprefix(f"{path}: ")
    except ValueError:
        return _NO_JSON
    return ""


def _there(url: str, names: Iterable[str]) -> list[RemoteFile]:
    """Return those of the files ``names`` that the web server has."""
    found = list[RemoteFile]()
    for name in names:
        with suppress(NothingThereError):
            found += HttpStore((f"{url}/{name}",), HttpClient()).files()
    return found


class NotThereError(DataError):
    """A place has none of the files."""


@dataclass(frozen=True)
class EncoderSource:
    """A folder of a base; ``text`` is what the user gave."""

    text: str
    open: Callable[[], Base]
    folder: str = ""

    def below(self, folder: str) -> EncoderSource:
        return EncoderSource(self.text, self.open, f"{self.folder}/{folder}".strip("/"))

    def copy(self, patterns: tuple[str, ...], target: Path) -> None:
        """Copy the files that match one of ``patterns`` to ``target``; NotThereError if there are none."""
        before = set(target.iterdir())
        self.open().copy(self.folder, patterns, target)
        if not {path for path in target.iterdir() if path.is_file()} - before:
            where = f", folder {self.folder}" if self.folder else ""
            raise NotThereError(f"{self.text}{where}: has no file {' or '.join(patterns)}")


def parse_source(text: str, scratch: Path, flag: str) -> EncoderSource:
    """Return the place that ``text`` names; files are downloaded to ``scratch``, later.

    Raises ConfigError, naming ``flag``, if it names none.
    """
    if text.startswith(HUB):
        match = _HUB_NAME.fullmatch(text)
        if match is None:
            raise ConfigError(flag, text, f"allowed: {_ALLOWED}")
        name, revision = match["name"], match["revision"] or "main"
        return EncoderSource(
            text, cache(lambda: open_hub_model(name, revision, scratch)), match["folder"] or ""
        )
    if text.endswith((".md5", ".uri")):
        return EncoderSource(text, cache(lambda: _downloaded(text, scratch)))
    if is_url(text):
        if fault := url_fault(f"{text}/"):
            raise ConfigError(flag, text, f"{fault}; allowed: {_ALLOWED}")
        return EncoderSource(text, lambda: StoreFolder(text.rstrip("/"), scratch))
    if not Path(text).is_dir():
        raise ConfigError(flag, text, f"no such folder; allowed: {_ALLOWED}")
    return EncoderSource(text, lambda: LocalFolder(Path(text)))


def _downloaded(manifest: str, scratch: Path) -> LocalFolder:
    """Download the files of ``manifest``, each verified by its MD5, unless that was done before."""
    download(manifest, scratch, stream=sys.stderr)
    return LocalFolder(scratch)


RECORD = "encoders.json"
Sums = dict[str, dict[str, Any]]


def sums_of(folder: Path) -> Sums:
    """Return size and SHA-256 of each file directly in ``folder``."""
    sums: Sums = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        sums[path.name] = {"size": path.stat().st_size, "sha256": digest}
    return sums


def compare_or_record(models: Path, name: str, sums: Sums) -> bool:
    """Return whether the encoder ``name`` was recorded before; record its ``sums`` if it was not.

    Raises DataError naming the first file that differs from the record.
    """
    path = models / RECORD
    recorded = _read(path)
    if name not in recorded:
        content = json.dumps({**recorded, name: sums}, indent=2)
        with atomic_write(path) as partial:
            partial.write_text(f"{content}\n", encoding="utf-8")
        return False
    before = recorded[name]
    for file in sorted({*before, *sums}):
        if before.get(file) != sums.get(file):
            how = "differs" if file in before else "is new"
            how = how if file in sums else "is missing"
            text = f"{file} {how}, by {path}, which has what was prepared first"
            raise DataError(f"{name}: {text}; remove its entry {name} to accept this one")
    return True


def _read(path: Path) -> dict[str, Sums]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: is not a JSON object")
    return content
