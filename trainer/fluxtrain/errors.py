"""Every error that a person can cause or cure, and the exit code that it ends with.

* FluxtrainError
  * ConfigError      a field, a flag or a file of the job is wrong
    * JoinedConfigError   several are
  * DataError        the data set, or a weights file, is missing or unusable
  * StorageError     the output cannot be written or read
  * DivergedError    the loss or its gradient is no longer finite
  * StoppedError     the run was asked to stop, and left a checkpoint
"""

EXIT_OK = 0
"""The run reached its target or its last step. Written by the trainer, read by the operator."""
EXIT_ERROR = 1
"""The program failed; a restart counts against the job's budget."""
EXIT_USAGE = 2
"""The job's own file, flags or data are wrong; no restart helps."""
EXIT_DIVERGED = 3
"""The loss or its gradient is NaN or infinite; a restart from the last checkpoint would diverge again."""
EXIT_STORAGE = 74
"""The output could not be written (EX_IOERR): full or read-only; what was saved is whole."""
EXIT_STOPPED = 75
"""Asked to stop (SIGTERM, SIGINT), checkpoint saved (EX_TEMPFAIL): the same command resumes."""


UNSET = object()
"""Stands for a value that the rule names itself."""


class FluxtrainError(Exception):
    """Something a person can cure; its text is the whole message, no traceback is shown."""

    exit_code = EXIT_ERROR


class ConfigError(FluxtrainError):
    """A field, a flag or a file of the job is wrong: says where, what was given, what is allowed."""

    exit_code = EXIT_USAGE

    def __init__(self, path: str, given: object, allowed: str) -> None:
        """Take the field's ``path`` (``spec.run.optim.learning_rate``), the value and the rule.

        Where the rule is about several fields and names their values, ``given`` is UNSET.
        """
        self.path, self.given, self.allowed = path, given, allowed
        said = "" if given is UNSET else f"got {_brief(given)}; "
        super().__init__(f"{path}: {said}{allowed}")


class JoinedConfigError(ConfigError):
    """Several fields are wrong: one line each."""

    def __init__(self, errors: list[ConfigError], most: int = 10) -> None:
        """Join ``errors``, the first ``most`` of them in full."""
        super().__init__(errors[0].path, errors[0].given, errors[0].allowed)
        lines = [str(error) for error in errors[:most]]
        if len(errors) > most:
            lines.append(f"... and {len(errors) - most} more")
        self.args = ("\n".join(lines),)


class DataError(FluxtrainError):
    """The data set or a weights file is missing or unusable."""

    exit_code = EXIT_USAGE


class StorageError(FluxtrainError):
    """The output cannot be written or read."""

    exit_code = EXIT_STORAGE


class DivergedError(FluxtrainError):
    """The loss or its gradient is no longer finite."""

    exit_code = EXIT_DIVERGED


class StoppedError(FluxtrainError):
    """The run was asked to stop and left a checkpoint behind."""

    exit_code = EXIT_STOPPED


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
