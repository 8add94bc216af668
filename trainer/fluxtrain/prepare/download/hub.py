"""Hugging Face's Hub, by its own client: listing a data set's files and bringing them here.

The client resumes, verifies and reads ``HF_TOKEN``, ``HF_HOME`` and ``HF_ENDPOINT`` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from fluxtrain.errors import ConfigError, DataError
from fluxtrain.prepare.download.http import DownloadError

PREFIX = "hf://datasets/"


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hub, at one commit."""

    name: str
    commit: str

    def files(self, pattern: str = "*") -> list[str]:
        """Return the paths that match ``pattern``, sorted."""
        from huggingface_hub import HfApi

        with _speaking(self.name):
            found = HfApi().list_repo_files(self.name, repo_type="dataset", revision=self.commit)
        return sorted(path for path in found if fnmatch(path, pattern))

    def fetch(self, path: str, folder: Path) -> Path:
        """Return the file ``path``, brought below ``folder``."""
        from huggingface_hub import hf_hub_download

        with _speaking(self.name):
            return Path(
                hf_hub_download(
                    self.name, path, repo_type="dataset", revision=self.commit, local_dir=folder
                )
            )

    def fetch_all(self, pattern: str, folder: Path, connections: int = 8) -> None:
        """Bring every file that matches ``pattern`` below ``folder``."""
        from huggingface_hub import snapshot_download

        with _speaking(self.name):
            snapshot_download(
                self.name,
                repo_type="dataset",
                revision=self.commit,
                local_dir=folder,
                allow_patterns=pattern,
                max_workers=connections,
            )


def open_hub(name: str, revision: str = "main") -> HubDataset:
    """Return the data set ``ORG/NAME`` at the commit that ``revision`` means now.

    Raises DownloadError where the Hub cannot be reached, DataError where it has no such data set.
    """
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError("--hub", name, "allowed: ORG/NAME of a data set")
    with _speaking(name):
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(name, revision=revision).sha
    return HubDataset(name, commit or revision)


@contextmanager
def _speaking(name: str) -> Iterator[None]:
    """Turn the client's errors into ours."""
    try:
        from huggingface_hub import errors
    except ImportError:
        raise DataError("the Hub's client is missing: install huggingface_hub") from None
    try:
        yield
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise DownloadError(f"{name}: the Hub cannot be reached: {_line(error)}") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise DataError(f"{name}: {_line(error)}") from None
    except Exception as error:  # the errors of the client's HTTP library, whichever that is
        raise DownloadError(f"{name}: {_line(error)}") from None


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text or type(error).__name__
