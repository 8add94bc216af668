"""Lists and downloads the files of a data set on the Hugging Face Hub, with its own client.

The client resumes and verifies; it reads ``HF_TOKEN``, ``HF_HOME`` and ``HF_ENDPOINT``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from fluxtrain.errors import ConfigError, DataError
from fluxtrain.remote.http import DownloadError

PREFIX = "hf://datasets/"


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hub, at one commit."""

    name: str
    commit: str

    def files(self, pattern: str = "*") -> list[str]:
        """Return the paths that match ``pattern``, sorted."""
        from huggingface_hub import HfApi

        with hub_errors(self.name):
            paths = HfApi().list_repo_files(self.name, repo_type="dataset", revision=self.commit)
        return sorted(path for path in paths if fnmatch(path, pattern))

    def fetch(self, path: str, folder: Path) -> Path:
        """Download the file ``path`` to ``folder``; return where it is."""
        from huggingface_hub import hf_hub_download

        with hub_errors(self.name):
            return Path(
                hf_hub_download(
                    self.name, path, repo_type="dataset", revision=self.commit, local_dir=folder
                )
            )

    def fetch_all(self, pattern: str, folder: Path, connections: int = 8) -> None:
        """Download every file that matches ``pattern`` to ``folder``."""
        from huggingface_hub import snapshot_download

        with hub_errors(self.name):
            snapshot_download(
                self.name,
                repo_type="dataset",
                revision=self.commit,
                local_dir=folder,
                allow_patterns=pattern,
                max_workers=connections,
            )


def open_hub(name: str, revision: str = "main", flag: str = "--hub") -> HubDataset:
    """Return the data set ``ORG/NAME``, the value of ``flag``, at the current commit of ``revision``.

    Raises DownloadError if the Hub cannot be reached, DataError if it has no such data set.
    """
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError(flag, name, "allowed: ORG/NAME of a data set")
    with hub_errors(name):
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(name, revision=revision).sha
    return HubDataset(name, commit or revision)


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Raise the client's errors as DownloadError or DataError."""
    try:
        from huggingface_hub import errors
    except ImportError:
        raise DataError("the Hub's client is missing: install huggingface_hub") from None
    try:
        yield
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise DownloadError(f"{name}: the Hub cannot be reached: {_one_line(error)}") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise DataError(f"{name}: {_one_line(error)}") from None
    except Exception as error:  # of the HTTP library that the client uses
        raise DownloadError(f"{name}: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text or type(error).__name__
