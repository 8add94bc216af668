"""Terminal output: a progress bar on a terminal, else one line per log interval."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from fluxtrain.report.metrics import LoggedStep

_GIB = 1 << 30


class Console:
    """Writes to stderr; in pods stdout has the MLPerf log."""

    def __init__(self, steps: int, step: int, stream: TextIO | None = None) -> None:
        """Show a bar from ``step`` to ``steps`` if ``stream``, by default stderr, is a terminal."""
        stream = stream or sys.stderr
        self._stream, self._steps, self._step = stream, steps, step
        self._bar: tqdm | None = None
        self.epochs: Callable[[int], int] | None = None
        """Returns the number of the epoch of a step; None: epochs are not shown."""
        if stream.isatty():
            self._bar = tqdm(
                total=steps,
                initial=step,
                desc="train",
                unit="step",
                file=stream,
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {postfix}",
            )

    def advance(self, step: int) -> None:
        """Move the bar to ``step``."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def step_line(self, step: LoggedStep) -> None:
        loss, rate = step.train_loss, step.samples_per_second
        left = duration(step.remaining_seconds)
        epoch = self._epoch(step.step)
        if self._bar is not None:
            mfu = "" if step.mfu is None else f" · MFU {step.mfu:.1%}"
            self._bar.set_postfix_str(
                f"{epoch}loss {loss:.4f} · {rate:.1f} samples/s{mfu} · {left} left"
            )
            return
        self.print_line(
            f"step {step.step:>7}/{self._steps}  {epoch}"
            f"loss {loss:<8.5f}  grad {step.grad_norm:<8.4f}  lr {step.learning_rate:.2e}  "
            f"{rate:>8.1f} samples/s  {_efficiency(step)}  {left} left"
        )

    def _epoch(self, step: int) -> str:
        if self.epochs is None:
            return ""
        last = self.epochs(self._steps)
        return f"epoch {self.epochs(step):>{len(str(last))}}/{last}  "

    def print_line(self, text: str) -> None:
        """Print ``text``, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def task(self, name: str, total: int) -> Callable[[int], None]:
        """Show a second bar; return a function that advances it by a number of samples."""
        if self._bar is None:
            return lambda done: None
        bar = tqdm(total=total, desc=name, unit="sample", file=self._stream, leave=False)

        def advance(done: int) -> None:
            bar.update(min(done, total - bar.n))
            if bar.n >= total:
                bar.close()

        return advance

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _efficiency(step: LoggedStep) -> str:
    """Return TFLOP/s of a GPU, MFU if it is known, and the most memory that was allocated and reserved."""
    mfu = "" if step.mfu is None else f"  MFU {step.mfu:>5.1%}"
    reserved, allocated = step.memory_reserved_bytes, step.memory_allocated_bytes / _GIB
    kept = "" if reserved is None else f" of {reserved / _GIB:.1f}"
    return f"{step.tflops_per_gpu:>7.3g} TFLOP/s{mfu}  {allocated:.1f}{kept} GiB"


def duration(seconds: float) -> str:
    """Return ``seconds`` as h:mm:ss."""
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
