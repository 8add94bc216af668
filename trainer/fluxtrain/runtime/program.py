"""How a program starts and ends: Ctrl-C, text in any locale, errors of one line, missing packages.

Imports next to nothing, so that Ctrl-C has its handler before anything that takes long is imported.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

_IMPORTLIB = "<frozen importlib._bootstrap>"
_DISTRIBUTIONS = {"PIL": "pillow", "aiohttp": "kubernetes", "braceexpand": "webdataset"}
"""The package that brings a module, where the names differ."""
_FOR_DEVELOPERS = {"test", "bench"}


def use_utf8() -> None:
    """Start this process anew in Python's UTF-8 mode unless its locale has UTF-8: for names of files.

    What it prints stays in the encoding of the locale.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ.setdefault("PYTHONIOENCODING", sys.stdout.encoding)
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def run(name: str, extra: str, body: Callable[[], int]) -> int:
    """Run ``body`` as the program ``name`` and return its exit code, 130 after Ctrl-C.

    A user's error and a missing package end in one line on stderr; ``extra`` is what to install for packages
    that several extras have.
    """
    interrupt = _Interrupt(name)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, interrupt)
    _open_closed_streams()
    write_any_text()
    from fluxtrain.errors import EXIT_OK, EXIT_STORAGE, EXIT_USAGE, FluxtrainError, one_line

    code = EXIT_OK
    try:
        code = body()
        sys.stdout.flush()
        return code
    except FluxtrainError as error:
        text, code = str(error), error.exit_code
    except ModuleNotFoundError as error:
        text, code = missing_package(error, extra), EXIT_USAGE
        if not text:
            raise
    except KeyboardInterrupt:
        return interrupt.report()
    except BrokenPipeError:
        _drop(sys.stdout)
        return code
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ENAMETOOLONG) and error.filename is not None:
            text = one_line(f"{error.filename}: cannot be used ({error.strerror})")
            code = EXIT_USAGE
        elif error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            _drop(sys.stdout)
            text, code = f"the output cannot be written ({error.strerror})", EXIT_STORAGE
        else:
            raise
    print(f"{name}: error: {text}", file=sys.stderr)
    return code


def _open_closed_streams() -> None:
    """Open /dev/null in place of streams that are closed: Python has None for them, children other files."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.dup2(descriptor, number)
            os.set_inheritable(number, True)  # if it was ``descriptor`` itself
            stream = os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _drop(stream: TextIO) -> None:
    """Drop what ``stream`` holds, and what comes: Python writes it at its end, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Interrupt:
    """Handles SIGINT: the first raises KeyboardInterrupt; a second, or one during an import, ends all.

    An exception that leaves an import may be lost, or be printed by whoever imports.
    """

    def __init__(self, name: str) -> None:
        self._line, self._has_come = f"{name}: interrupted\n", False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self._has_come or _is_importing(frame):
            os.write(2, self._line.encode())
            os._exit(128 + signum)
        self._has_come = True
        raise KeyboardInterrupt

    def report(self) -> int:
        """Print that the program was interrupted, once, and return its exit code."""
        line, self._line = self._line, ""
        print(line, end="", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORTLIB:
        frame = frame.f_back
    return frame is not None


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Block SIGINT meanwhile, and for ever in processes that are started; here it arrives afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def importing() -> Iterator[None]:
    """Import modules without garbage collection, a seventh of the time; later passes skip them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def write_any_text() -> None:
    r"""Let stdout and stderr write a character that their encoding lacks as \u2192, instead of failing.

    What is written to stderr after its reader has ended is dropped: a run goes on without it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        encoding, errors = sys.stderr.encoding, sys.stderr.errors
        sys.stderr = _Stderr(sys.stderr.buffer, encoding, errors, line_buffering=True)


class _Stderr(io.TextIOWrapper):
    """A stderr that cannot fail: if it cannot be written, it becomes /dev/null."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            _drop(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            _drop(self)


def missing_package(error: ModuleNotFoundError, extra: str = "trainer") -> str:
    """Return which package to install, with ``extra`` if that has it; empty if no extra of fluxtrain has it.

    Then it is no package that is missing: an installation is broken.
    """
    import re
    from importlib.metadata import PackageNotFoundError, requires

    module = error.name or ""
    package = _DISTRIBUTIONS.get(module, module.replace("_", "-"))
    entry = re.compile(rf"{re.escape(package)}(?![\w.-]).*extra == .([\w-]+)")
    try:
        found = {match[1] for line in requires("fluxtrain") or () if (match := entry.match(line))}
    except PackageNotFoundError:  # run from its sources
        found = set()
    extras = sorted(found - _FOR_DEVELOPERS, key=lambda name: (name != extra, name))
    return needs(package, extras[0]) if extras else ""


MLPERF_PACKAGE = "mlperf_logging"
"""MLCommons' package, of the extra ``mlperf``: it brings pandas and scipy."""


def needs(package: str, extra: str) -> str:
    """Return that ``package`` is missing, and what installs it with ``extra``; in a pod an image has it."""
    from fluxtrain.contract.process import ENV_POD_UID

    if ENV_POD_UID in os.environ:
        return f"the image has no package {package}: name one in spec.image that does (docs/cluster.md)"
    return f"the package {package} is not installed: pip install 'fluxtrain[{extra}]'"
