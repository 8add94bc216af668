"""Shows how much of a cache is done: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from fluxtrain.picture_cache.work import CachedPictures

_LINE_SECONDS, _BAR_SECONDS = 10.0, 0.5


class CachingConsole:
    """Writes to stderr on rank 0; ``total`` is the number of pictures and captions to encode."""

    def __init__(self, is_shown: bool, work: CachedPictures) -> None:
        """Print what there is to do."""
        self.total = len(work.missing_pictures) + len(work.missing_texts)
        self._stream, self._is_shown, self._begin = sys.stderr, is_shown, time.monotonic()
        self._bar: tqdm | None = None
        is_terminal = self._stream.isatty()
        self._every = _BAR_SECONDS if is_terminal else _LINE_SECONDS
        self._next = self._begin + self._every
        if is_shown:
            print(_summary(work), file=self._stream, flush=True)
            if is_terminal and self.total:
                self._bar = tqdm(total=self.total, desc="encode", file=self._stream)

    def __enter__(self) -> CachingConsole:
        """Return the console."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    @property
    def is_due(self) -> bool:
        """Return whether it is time to show the progress again."""
        return self._is_shown and time.monotonic() >= self._next

    def advance(self, done: int) -> None:
        """Show that ``done`` of the total are encoded."""
        if not self.is_due:
            return
        now = time.monotonic()
        self._next = now + self._every
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            return
        rate = done / (now - self._begin)
        left = f"{(self.total - done) / rate:.0f} s left" if rate else "time left unknown"
        text = f"encode {done:>6}/{self.total}  {rate:>6.1f} /s  {left}"
        print(text, file=self._stream, flush=True)


def _summary(work: CachedPictures) -> str:
    samples = work.pictures if work.stored is None else work.stored.samples
    pictures, texts = len(work.missing_pictures), len(work.missing_texts)
    captions = sum(1 for sample in samples if not sample.caption)
    held_out = () if work.stored is None else work.stored.validation
    return (
        f"{len(samples)} pictures, {sum(each.repeats for each in samples)} samples in an epoch"
        + f", {captions} without caption" * bool(captions)
        + f", {len(held_out)} held out" * bool(held_out)
        + f", {len(work.skipped)} files skipped" * bool(work.skipped)
        + f" · {pictures} pictures and {texts} captions to encode in {work.cache.folder}"
    )
