"""Rules on the data of a run, and on the counts of samples in its log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from fluxtrain.contract.run.presets import MLPERF_TRAINING_SET
from fluxtrain.mlperf.evidence import Run
from fluxtrain.mlperf.lines import LogLine
from fluxtrain.mlperf.review.evaluations import cadence
from fluxtrain.mlperf.review.rule import Rule, rule

_COUNTED = ("block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop")
_ORIGINAL = "Give the original log; fluxtrain counts each sample once."


@rule("training-set", "6.5", "Train on the whole of MLCommons' training set.", closed_only=True)
def training_set(run: Run) -> Iterator[str]:
    """1,099,776 samples."""
    for line in run.all("train_samples"):
        if line.value != MLPERF_TRAINING_SET:
            yield f"{line.place} is {line.value}; needed: {MLPERF_TRAINING_SET}"


@rule("whole-batches", "6.6", _ORIGINAL)
def whole_batches(run: Run) -> Iterator[str]:
    """Every count of samples is a number of whole batches."""
    batch = run.number("global_batch_size")
    if not batch or batch < 1:
        return
    for line in run.all(*_COUNTED):
        if line.samples is not None and (line.samples < 0 or line.samples % batch):
            yield (
                f"{line.place} is at {line.samples:,} samples, "
                f"which are not whole batches of {batch}"
            )
            return


@rule("counts-continue", "6.6", _ORIGINAL)
def counts_continue(run: Run) -> Iterator[str]:
    """A block starts where the one before it stopped, and is evaluated where it stops.

    Submitters write the length of a block into its start and its stop; both forms are known.
    """
    lines = run.all("block_start", "block_stop", "eval_start", "eval_accuracy")
    blocks = [line for line in lines if line.key.startswith("block")]
    if _are_lengths(blocks):
        yield from _lengths(run, blocks)
        return
    if blocks and blocks[0].key == "block_start" and blocks[0].samples:
        yield f"{blocks[0].place} is at {blocks[0].samples:,} samples; the first block starts at 0"
    for earlier, later in pairwise(lines):
        if (earlier.key, later.key) == ("block_start", "block_stop"):
            wrong = (later.samples or 0) < (earlier.samples or 0)
        else:
            wrong = later.samples != earlier.samples
        if wrong:
            yield (
                f"{later.place} is at {later.samples} samples, after {earlier.place} at {earlier.samples}"
            )
            return


@rule("steps-are-samples", "6.6", _ORIGINAL)
def steps_are_samples(run: Run) -> Iterator[str]:
    """A step in the metadata of an evaluation, times the batch size, is its samples."""
    batch = run.number("global_batch_size")
    for line in run.all("eval_start", "eval_stop"):
        step = line.fields["metadata"].get("step")
        if batch and isinstance(step, int) and line.samples not in (None, step * batch):
            yield f"{line.place} is at {line.samples} samples, but step {step} x {batch} is {step * batch}"
            return


@rule("end-is-the-last-evaluation", "11", _ORIGINAL)
def end_is_the_last_evaluation(run: Run) -> Iterator[str]:
    """A run that succeeded stops at the samples of its last evaluation."""
    stop, evaluations = run.first("run_stop"), run.all("eval_accuracy")
    if stop is None or not evaluations or not run.succeeded or stop.samples is None:
        return
    if stop.samples != evaluations[-1].samples:
        yield (
            f"{stop.place} is at {stop.samples} samples, the last evaluation at "
            f"{evaluations[-1].samples}"
        )


RULES: tuple[Rule[Run], ...] = (
    training_set,
    whole_batches,
    counts_continue,
    steps_are_samples,
    end_is_the_last_evaluation,
)


def _are_lengths(blocks: list[LogLine]) -> bool:
    """Return whether the blocks have their lengths: the first one would start at 0 otherwise."""
    return len(blocks) > 1 and bool(blocks[0].samples) and blocks[0].samples == blocks[1].samples


def _lengths(run: Run, blocks: list[LogLine]) -> Iterator[str]:
    every = cadence(run) if run.closed else blocks[0].samples
    for line in blocks:
        if line.samples != every:
            yield f"{line.place} is of {line.samples} samples; the blocks of this run are of {every}"
            return
