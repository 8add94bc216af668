"""Train: the entry point under torchrun, and the loop that everything else serves."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain import checkpoint, optim
from fluxtrain.checkpoint import Checkpoints, RunState
from fluxtrain.contract.check import validate
from fluxtrain.contract.config import RunConfig
from fluxtrain.contract.launch import CHECKPOINTS_FOLDER, ENV_CONFIG, ENV_VERDICT, Places
from fluxtrain.data.batch import Batch
from fluxtrain.data.loader import AnyBatch, evaluation_batches, training_batches
from fluxtrain.data.order import FILLER, accumulation_steps
from fluxtrain.distributed import StopRequest, World, die_with_parent, joined
from fluxtrain.encoding import batch_encoder
from fluxtrain.errors import (
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_OK,
    EXIT_STORAGE,
    EXIT_USAGE,
    DataError,
    DivergedError,
    FluxtrainError,
    StoppedError,
)
from fluxtrain.evaluate import Evaluation, evaluate, require_readable
from fluxtrain.gallery import draw_gallery
from fluxtrain.loss import FlowLoss
from fluxtrain.observe import Observer, StepFacts
from fluxtrain.parallelize import DTYPES, build_model, micro_batch_size, whole
from fluxtrain.prepare.task import prepare
from fluxtrain.preprocess import preprocess
from fluxtrain.weights.source import published_weights

_STORAGE_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


@dataclass
class Trainer:
    """The pieces of one running training."""

    config: RunConfig
    places: Places
    world: World
    encode: Callable[[AnyBatch], Batch]
    flow_loss: FlowLoss
    optimizer: torch.optim.AdamW
    checkpoints: Checkpoints
    observer: Observer
    stop: StopRequest
    run: RunState
    bad_step: Tensor  # on the device: the first one whose gradient norm was not finite
    samples_at_start: int = 0
    bad_samples: int = 0


def train(config: RunConfig, places: Places, world: World) -> RunState:
    """Train until the last step, the target or a request to stop; return how the run ended.

    Resumes from the newest complete checkpoint in ``places.output``. Raises StoppedError when it was
    asked to stop (a checkpoint is left), DivergedError where loss or gradients are no longer finite.
    """
    with ExitStack() as stack:
        trainer = _prepare(config, places, world, stack)
        trainer.observer.ready()
        batches = _training_batches(trainer)  # from here on samples are read
        if config.evaluation.at_start and trainer.run.step == 0:
            _evaluate(trainer)
        while trainer.run.status == "running":
            _step(trainer, batches)
        trainer.checkpoints.finish()
        trainer.observer.finished(trainer.run)
        return trainer.run


def _prepare(config: RunConfig, places: Places, world: World, stack: ExitStack) -> Trainer:
    stop = StopRequest(world)
    stop.listen()
    stack.callback(stop.settle)
    observer = stack.enter_context(Observer(config, places, world))
    folder = places.output / CHECKPOINTS_FOLDER
    newest = checkpoint.latest(folder)
    if newest is not None:
        checkpoint.check_same_run(config, newest)
    encode = batch_encoder(config, places.models, world.device)
    published = None if newest else published_weights(config, places.models)
    model = build_model(config, world, published, observer.alive)
    optimizer = optim.make_optimizer(model, config.optim)
    state = checkpoint.training_state(model, optimizer)
    run = RunState(step=0, samples=0)
    if newest is not None:
        run = checkpoint.load(newest, state, observer.alive)
        run = run if run.is_over(config) else replace(run, status="running")
        optim.set_steps_taken(optimizer, run.step)
    checkpoints = Checkpoints(
        folder,
        state,
        config,
        world.is_main,
        saved_step=run.step or None,
        saved=observer.saved,
        alive=observer.alive,
    )
    observer.begin(run, sum(p.numel() for p in model.parameters()))
    loss = FlowLoss(model, config, DTYPES[config.precision.compute])
    gc.collect()
    gc.freeze()  # what lives now lives to the end: later collections need not look at it
    stack.callback(gc.unfreeze)
    return Trainer(
        config,
        places,
        world,
        encode,
        loss,
        optimizer,
        checkpoints,
        observer,
        stop,
        run,
        torch.tensor(optim.NEVER, device=world.device),
        run.samples,
    )


def _training_batches(trainer: Trainer) -> Iterator[AnyBatch]:
    world, config = trainer.world, trainer.config
    return iter(
        training_batches(
            config,
            trainer.places.data,
            first_batch=trainer.run.step,
            rank=world.rank,
            world_size=world.size,
            micro_batch_size=micro_batch_size(config, world.size),
            pin=world.device.type == "cuda",
        )
    )


def _step(trainer: Trainer, batches: Iterator[AnyBatch]) -> None:
    """Take one optimizer step, then do what is due after it."""
    config, run = trainer.config, trainer.run
    step = run.step + 1
    trainer.observer.step_begins(step)
    rate = optim.learning_rate(step, config.optim, config.schedule)
    optim.set_learning_rate(trainer.optimizer, rate)
    totals = _accumulate(trainer, batches)
    parameters = trainer.flow_loss.model.parameters()
    norm = whole(optim.clip_gradients(parameters, config.optim.max_grad_norm))
    trainer.bad_step = optim.first_bad_step(trainer.bad_step, norm, step)
    optim.update(trainer.optimizer, trainer.bad_step)
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.run = run = replace(run, step=step, samples=step * config.schedule.global_batch_size)
    trainer.observer.step_done(step)

    # once in a while: read loss and norm (the only waits for the device), evaluate, draw, save
    last = step == config.schedule.steps
    if step % config.logging.every_steps == 0 or last:
        _log(trainer, totals, norm, rate)
    period = config.evaluation_steps
    if (period and step % period == 0) or (last and config.evaluation.at_end):
        _evaluate(trainer)
    stop = trainer.stop.agreed()
    if trainer.run.status == "running" and last:
        target = config.evaluation.target_loss
        trainer.run = replace(trainer.run, status="success" if target is None else "aborted")
    every = config.sampling.every_steps
    if over := trainer.run.status != "running":
        trainer.observer.over(trainer.run)
    if (every and step % every == 0) or (over and config.sampling.at_end):
        _check_finite(trainer)
        trainer.observer.sample(trainer.flow_loss, step)
    every = config.checkpoint.every_steps
    if stop or over or (every and step % every == 0):
        _save(trainer, totals, wait=stop or over)
    if stop and not over:
        raise StoppedError(
            f"stopped after step {step}; a checkpoint is saved, the same command resumes"
        )


def _accumulate(trainer: Trainer, batches: Iterator[AnyBatch]) -> Tensor:
    """Sum gradients over this rank's micro batches; return (sum of losses, samples used)."""
    config, world = trainer.config, trainer.world
    batch_size, micro = config.schedule.global_batch_size, micro_batch_size(config, world.size)
    totals, used = torch.zeros(2, device=world.device), list[int]()
    for _ in range(accumulation_steps(batch_size, micro, world.size)):
        with trainer.observer.waiting_for_data():
            batch = next(batches)
        trainer.observer.faults(batch.faults)
        moved = trainer.encode(batch)
        losses = trainer.flow_loss(moved) * moved.weights
        # Ranks' gradients are averaged, so each divides by an equal part of the global batch.
        torch.autograd.backward(losses.sum() / (batch_size / world.size))
        totals[0] += losses.detach().sum()
        totals[1] += moved.weights.sum()
        used += batch.indices[batch.indices != FILLER].tolist()
    trainer.observer.used(trainer.run.step + 1, used)
    return totals


def _log(trainer: Trainer, totals: Tensor, norm: Tensor, rate: float) -> None:
    loss_sum, samples = trainer.world.all_sum(totals.clone()).tolist()
    loss = loss_sum / max(samples, 1.0)
    trainer.observer.metrics.train_loss.set(loss)  # before it is judged: an alert asks for NaN
    _check_finite(trainer, loss)
    _check_faults(trainer)
    facts = StepFacts(trainer.run.step, trainer.run.samples, loss, norm.item(), rate)
    trainer.observer.step_facts(facts)


def _check_finite(trainer: Trainer, loss: float = 0.0, kind: str = "training") -> None:
    """Raise DivergedError where ``loss``, or the gradients of a step so far, are not finite.

    Every rank must call it and finds the same. After such gradients nothing was updated any more.
    """
    bad_step, wrong = int(trainer.bad_step.item()), list[str]()
    if not math.isfinite(loss):
        wrong.append(f"the {kind} loss is {loss} at step {trainer.run.step}")
    if bad_step != optim.NEVER:
        wrong.append(f"the gradient norm is not finite at step {bad_step}")
    if not wrong:
        return
    trainer.checkpoints.finish()  # one that is being written is good, and kept
    saved = trainer.checkpoints.saved_step
    kept = f"the checkpoint of step {saved} is kept" if saved else "no checkpoint was saved yet"
    advice = "lower spec.run.optim.learning_rate or lengthen spec.run.schedule.warmup_steps"
    raise DivergedError("; ".join([*wrong, kept, advice]))


def _check_faults(trainer: Trainer) -> None:
    """Stop where too many samples were unreadable: one is bad luck, many are the wrong data."""
    counts = torch.tensor([float(trainer.observer.num_faults)], device=trainer.world.device)
    faults = int(trainer.world.all_sum(counts).item())
    used = trainer.run.samples - trainer.samples_at_start
    limit = trainer.config.data.max_bad_fraction
    if faults > max(1.0, limit * used):
        raise DataError(
            f"{faults} of {used} samples could not be read, more than "
            f"spec.run.data.max_bad_fraction {limit} allows; the last: {trainer.observer.last_fault}"
        )


def _evaluate(trainer: Trainer) -> Evaluation:
    """Evaluate; the run ends with success where the target is reached."""
    _check_finite(trainer)
    config, world = trainer.config, trainer.world
    model = trainer.flow_loss.model
    advance = trainer.observer.evaluation_begins(trainer.run)
    model.eval()
    batches = evaluation_batches(config, trainer.places.data, world.rank, world.size)
    result = evaluate(trainer.flow_loss, map(trainer.encode, batches), world, advance)
    model.train()
    trainer.observer.left_out(result)
    require_readable(result, config)
    _check_finite(trainer, result.loss, "evaluation")
    trainer.run = replace(trainer.run, eval_loss=result.loss)
    target = config.evaluation.target_loss
    if target is not None and result.loss <= target and trainer.run.step > 0:
        trainer.run = replace(trainer.run, status="success")
    trainer.observer.evaluation_done(trainer.run, result)
    return result


def _save(trainer: Trainer, totals: Tensor, wait: bool) -> None:
    """Save, unless the weights are already poisoned: the last good checkpoint must stay the newest."""
    loss = trainer.world.all_sum(totals.clone())[0].item()
    _check_finite(trainer, loss)
    trainer.run = replace(trainer.run, train_seconds=trainer.observer.train_seconds)
    with trainer.observer.saving(trainer.run):
        trainer.checkpoints.save(trainer.run)
        if wait:
            trainer.checkpoints.finish()


TASKS: dict[str, Callable[[RunConfig, Places, World], object]] = {
    "train": train,
    "prepare": prepare,
    "preprocess": preprocess,
    "sample": draw_gallery,
}
"""What one rank runs, by ``spec.run.task``."""

FINAL_CODES = (EXIT_USAGE, EXIT_DIVERGED, EXIT_STORAGE)
"""Exit codes that torchrun's restart of the processes in place would only bring again."""


def main() -> int:
    """Run this rank as torchrun's environment says; return the exit code of the contract."""
    die_with_parent()
    places = Places.from_environment(os.environ)
    try:
        text = Path(os.environ[ENV_CONFIG]).read_text()
        config = validate(RunConfig, json.loads(text), "spec.run")
        with joined() as world:
            TASKS[config.task](config, places, world)
        return EXIT_OK
    except FluxtrainError as error:
        return _report(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in _STORAGE_ERRNO:
            return _report(traceback.format_exc(), EXIT_ERROR)
        where = error.filename or places.output
        return _report(f"{where}: cannot be written or read ({error.strerror})", EXIT_STORAGE)
    except Exception:
        return _report(traceback.format_exc(), EXIT_ERROR)


def _report(message: str, exit_code: int) -> int:
    """Hand ``message`` to the agent that started this process, or print it where there is none."""
    target = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if target is None:
        print(message, file=sys.stderr, flush=True)
        return exit_code
    record = {"message": message, "timestamp": int(time.time())}
    Path(target).write_text(json.dumps(record))
    verdict = os.environ.get(ENV_VERDICT)
    if verdict is not None and exit_code in FINAL_CODES:
        Path(verdict).write_text(json.dumps({"code": exit_code, "message": message}))
        os.kill(os.getppid(), signal.SIGUSR1)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
