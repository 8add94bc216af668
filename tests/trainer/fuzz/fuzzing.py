"""Gives changed inputs to a reader in a limited child process, and reports what it may not do.

A reader returns, or raises an error of `fluxtrain.errors` in one line of printable text. The input is on the
disk while it is read, so that one which ends the process is known too.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from tests.trainer import ranks
from tests.trainer.fuzz.mutations import changed
from tests.trainer.fuzz.target import Target
from tests.trainer.fuzz.targets import targets

from fluxtrain.errors import FluxtrainError

HEADROOM = 1 << 30
"""Bytes of addresses beyond those that the process has."""
SLOW_SECONDS = 20.0
"""Of the process's CPU; an input that takes longer is a finding."""
_MAX_MESSAGE = 2000


class Finding(Exception):  # noqa: N818  (what was found need not be an error)
    """What a reader may not do."""


@dataclass(frozen=True)
class Result:
    """What fuzzing a target came to."""

    name: str
    finding: str
    """Empty if there is none."""
    num_inputs: int = 0
    cpu_seconds: float = 0.0


def fuzz(names: list[str], seconds: float, examples: int | None = None) -> list[Result]:
    """Fuzz the targets ``names``, each for ``seconds`` or so many ``examples``; stop if the process ends."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        process = ranks.FORKED.Process(
            target=_fuzz_all, args=(names, seconds, examples, Path(folder), report)
        )
        ranks.start_process(process)
        process.join()
        lines = report.read_text().splitlines() if report.exists() else []
        results = [Result(**json.loads(line)) for line in lines]
        if len(results) < len(names):
            name = names[len(results)]
            left = next((Path(folder) / name).iterdir(), None)
            content = left.read_bytes() if left else b""
            results.append(
                Result(name, f"the process ended with {process.exitcode} at {content!r}")
            )
        return results


def _fuzz_all(
    names: list[str], seconds: float, examples: int | None, folder: Path, report: Path
) -> None:
    limit = _addresses() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with report.open("w", buffering=1) as file:
        for name in names:
            (folder / name).mkdir()
            result = _fuzz(name, seconds, examples, folder / name)
            file.write(json.dumps(vars(result)) + "\n")


def _fuzz(name: str, seconds: float, examples: int | None, folder: Path) -> Result:
    """Return the smallest finding, if there is one."""
    target, deadline = targets()[name], time.monotonic() + seconds
    path, count, begin = folder / target.file, 0, time.process_time()

    @settings(
        max_examples=examples or 1_000_000,
        deadline=None,
        database=None,
        derandomize=examples is not None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        verbosity=Verbosity.quiet,
    )
    @given(changed(target.seeds()))
    def run(content: bytes) -> None:
        nonlocal count
        if examples is None and time.monotonic() > deadline:
            raise _Over
        count += 1
        path.write_bytes(content)
        check(target, path)

    finding = ""
    try:
        run()
    except _Over:
        pass
    except Finding as error:
        finding = f"{error} at {path.read_bytes()!r}"
    return Result(name, finding, count, round(time.process_time() - begin, 1))


class _Over(BaseException):
    """The time is over."""


def check(target: Target, path: Path) -> None:
    """Read ``path``; raise Finding if the reader does what it may not do."""
    begin, expected = time.process_time(), FluxtrainError
    allowed = (expected, ValueError) if target.raises_value_errors else (expected,)
    try:
        target.read(path)
    except allowed as error:
        text = str(error)
        if not target.raises_value_errors and (len(text) > _MAX_MESSAGE or not _is_plain(text)):
            raise Finding(f"the message {text!r:.300}") from None
    except Exception as error:
        raise Finding(f"uncaught {error!r:.300}") from error
    if time.process_time() - begin > SLOW_SECONDS:
        raise Finding(f"{time.process_time() - begin:.0f} s of CPU")


def _is_plain(text: str) -> bool:
    """Return whether ``text`` is of printable characters, in lines that begin with a field's path."""
    return all(line.isprintable() for line in text.split("\n"))


def _addresses() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            return int(line.split()[1]) * 1024
    raise AssertionError
