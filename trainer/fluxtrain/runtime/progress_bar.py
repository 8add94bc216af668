"""Progress of a preparation: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

Advance = Callable[[int], None]
"""Takes the units done since the last call."""
OnProgress = Callable[[int, int], None]
"""Takes the units done so far and the total."""
_LOG_INTERVAL_SECONDS = 10.0


@contextmanager
def progress_bar(
    name: str, total: int, stream: TextIO, on_progress: OnProgress | None = None
) -> Iterator[Advance]:
    """Yield the function that advances the bar; it also calls ``on_progress`` each time."""
    done, last_logged = 0, time.monotonic()
    with tqdm(total=total, desc=name, file=stream, leave=False, disable=not stream.isatty()) as bar:

        def advance(count: int) -> None:
            nonlocal done, last_logged
            done += count
            bar.update(count)
            if on_progress is not None:
                on_progress(done, total)
            if bar.disable and time.monotonic() > last_logged + _LOG_INTERVAL_SECONDS:
                last_logged = time.monotonic()
                print(f"{name}: {done:,} of {total:,}", file=stream, flush=True)

        yield advance
