"""Errors that the user can fix, and the exit code of each.

* FluxtrainError
  * ConfigError      a field, a flag or a file of the job is wrong
    * JoinedConfigError   several of them
  * DataError        the data set, or a weights file, is missing or unusable
    * JoinedDataError     several files of it
  * StorageError     the output cannot be written or read
  * FencedError      a newer start of the run writes to the output
  * DivergedError    the loss or its gradient is no longer finite
  * UnfitNodeError   the preflight found a rank's device or its link to other nodes too slow
  * StoppedError     the run was asked to stop and saved a checkpoint
  * RefusedError     the rendezvous does not admit this node
  * NodesError       too few nodes have come to the rendezvous
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any

EXIT_OK = 0
"""The run reached its target or its last step. Written by the trainer, read by the operator."""
EXIT_ERROR = 1
"""The program failed; a restart counts against restart.maxRestarts."""
EXIT_USAGE = 2
"""The job's file, flags or data are wrong; a restart does not help."""
EXIT_DIVERGED = 3
"""The loss or its gradient is NaN or infinite; a restart from the last checkpoint would diverge again."""
EXIT_UNFIT = 69
"""A rank's device, or its link to other nodes, is slower than the median by more than the preflight allows
(EX_UNAVAILABLE): its pod is replaced, and nothing is charged, as the node is at fault."""
EXIT_STORAGE = 74
"""The output could not be written (EX_IOERR): full or read-only; saved checkpoints are complete."""
EXIT_STOPPED = 75
"""Asked to stop (SIGTERM, SIGINT), checkpoint saved (EX_TEMPFAIL): the same command resumes."""
EXIT_INTERRUPTED = 130
"""Asked to stop by Ctrl-C (SIGINT), nothing saved: the code that shells give it."""


_MLPERF_TOKEN = ":::MLLOG"
"""As `fluxtrain.contract.process.MLPERF_TOKEN`: what stands before it in a line does not count."""
_LONGEST = 80
"""Characters of a given value in a message."""
UNSET = object()
"""Given value of a ConfigError whose text names the values itself."""


class FluxtrainError(Exception):
    """An error that the user can fix: its text is printed without a traceback."""

    exit_code = EXIT_ERROR

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another rank raise the error too, whatever the arguments of its class are."""
        return _restore, (type(self), self.args)


def _restore(kind: type[FluxtrainError], args: tuple[object, ...]) -> FluxtrainError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class ConfigError(FluxtrainError):
    """A field, a flag or a file of the job is wrong; names its path, the given value and the allowed ones."""

    exit_code = EXIT_USAGE

    def __init__(self, path: str, given: object, allowed: str) -> None:
        """Name the field's ``path`` (``spec.run.optim.learning_rate``), its value and the allowed values.

        ``given`` is UNSET if ``allowed`` names the values itself.
        """
        self.path, self.given, self.allowed = path, given, allowed
        got = "" if given is UNSET else f"got {_brief(given)}; "
        super().__init__(one_line(f"{path}: {got}{allowed}"))


class JoinedConfigError(ConfigError):
    """Several fields are wrong; one line for each."""

    def __init__(self, errors: list[ConfigError], most: int = 10) -> None:
        """Join ``errors``; only the first ``most`` are written out."""
        super().__init__(errors[0].path, errors[0].given, errors[0].allowed)
        self.errors = errors
        lines = [str(error) for error in errors[:most]]
        if len(errors) > most:
            lines.append(f"... and {len(errors) - most} more")
        self.args = ("\n".join(lines),)


class DataError(FluxtrainError):
    """The data set or a weights file is missing or unusable."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str) -> None:
        """Take the message, in which names of files and samples may be anything."""
        super().__init__(one_line(message))


class JoinedDataError(DataError):
    """Several files are unusable; one line for each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(lines[0])
        self.args = ("\n".join(map(one_line, lines)),)


class StorageError(FluxtrainError):
    """The output cannot be written or read."""

    exit_code = EXIT_STORAGE


class FencedError(FluxtrainError):
    """A newer start of all ranks writes to the output; these ranks were left behind."""


class DivergedError(FluxtrainError):
    """The loss or its gradient is no longer finite."""

    exit_code = EXIT_DIVERGED


class UnfitNodeError(FluxtrainError):
    """The device of this rank is too slow."""

    exit_code = EXIT_UNFIT


class StoppedError(FluxtrainError):
    """The run was asked to stop and saved a checkpoint."""

    exit_code = EXIT_STOPPED


class RefusedError(FluxtrainError):
    """The rendezvous does not admit this node: another has its rank, or starts other trainers."""

    exit_code = EXIT_USAGE


class NodesError(FluxtrainError):
    """The rendezvous was not reached in time, or too few nodes have come; the same command resumes."""


_CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def has_controls(name: str) -> bool:
    """Return whether ``name`` has control characters, those of direction too, or bytes not in UTF-8.

    It may have others that are not printable, such as the wide spaces of macOS and of Japanese keyboards.
    """
    return _CONTROLS.search(name) is not None


def one_line(text: str) -> str:
    """Return ``text`` without line breaks, control characters and the token of MLPerf's log lines.

    Names of files, samples and columns are strangers' words: none may begin a line, or move a cursor.
    """
    if not text.isprintable():
        text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return text.replace(_MLPERF_TOKEN, _MLPERF_TOKEN.strip(":"))


def in_yaml_words(value: object, depth: int = 0) -> str:
    """Return ``value`` as text, in which null, true and false are those of YAML and JSON.

    What is nested deeply, or late in a long list, is left out.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, Mapping | list | tuple):
        return repr(value)
    if depth == _LONGEST:
        return "..."
    first = islice(value.items() if isinstance(value, Mapping) else value, _LONGEST)
    if isinstance(value, Mapping):
        pairs = (map(partial(in_yaml_words, depth=depth + 1), pair) for pair in first)
        return f"{{{', '.join(map(': '.join, pairs))}}}"
    return f"[{', '.join(in_yaml_words(each, depth + 1) for each in first)}]"


def _brief(value: object) -> str:
    fields = getattr(value, "model_dump", None)  # of a part of the configuration
    text = redacted(in_yaml_words(fields() if fields else value))
    half = _LONGEST // 2  # a path is known by its end
    return text if len(text) <= _LONGEST else f"{text[: half - 3]}...{text[-half:]}"


# Texts without credentials: for statuses, events, logs and messages, which more people read than
# Secrets.


_USER = re.compile(r"//(?:[^\s/?#\"'<>]|[\"'](?![,:\]}\s]))*@")
_WORD = re.compile(r"[^\s\"'<>]+")
_QUERY = re.compile(r"[?#]")
_TOKEN = re.compile(r"\b(hf_|AKIA|ASIA|gh[opsur]_|github_pat_)[A-Za-z0-9_]{16,}")
_HEADER = re.compile(
    r"(?i)\b(authorization['\"]?\s{0,4}[:=]\s{0,4}['\"]?)(?:\w{1,16} {1,4})?[^\s'\"]+"
)
_BEARER = re.compile(r"(?i)\b(bearer {1,4})[A-Za-z0-9._~+/=-]{16,}")
SECRET_QUERY = r"[?&][^=&#]*(?i:sig|token|key|cred|secret|passw|auth)[^=&#]*="
"""A query whose parameters grant access, such as that of a signed URL; RE2, as the API server has it."""


def redacted(text: str) -> str:
    """Return ``text`` with *** for what could be a credential.

    These are users, passwords and queries of URLs and of paths, values of Authorization headers, and tokens
    of Hugging Face, AWS and GitHub.
    """
    text = _WORD.sub(lambda word: _without_query(word[0]), _USER.sub("//***@", text))
    for pattern in (_TOKEN, _HEADER, _BEARER):
        text = pattern.sub(r"\1***", text)
    return text


def _without_query(word: str) -> str:
    """Return ``word`` without what follows ? or # in a URL, or in a path if there is a =."""
    begin = word.find("/")
    mark = _QUERY.search(word, begin) if begin >= 0 else None
    if mark is None or ("://" not in word and "=" not in word[mark.end() :]):
        return word
    return word[: mark.end()] + "***" if mark.end() < len(word) else word
