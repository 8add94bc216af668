"""The training of one run: prepare, step, evaluate, sample, save."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fluxtrain import checkpoint, optim
from fluxtrain.bad_samples import require_few_bad_samples, require_readable
from fluxtrain.checkpoint import Checkpoints, RunState
from fluxtrain.contract.launch import CHECKPOINTS_FOLDER, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.batch import Batch
from fluxtrain.data.loader import AnyBatch, evaluation_batches, training_batches
from fluxtrain.data.order import PADDING, BatchShares
from fluxtrain.data.sources import Sources, open_sources
from fluxtrain.distributed import StopRequest, World
from fluxtrain.divergence import require_finite
from fluxtrain.encode.encoders import batch_encoder
from fluxtrain.errors import StoppedError
from fluxtrain.evaluate import evaluate
from fluxtrain.loss import FlowLoss
from fluxtrain.parallelize import DTYPES, build_model, full_tensor
from fluxtrain.report.observer import Observer, StepFacts
from fluxtrain.sample.grid import GridSampler
from fluxtrain.weights.reader import published_weights


@dataclass
class Trainer:
    """The parts of one running training."""

    config: RunConfig
    world: World
    sources: Sources
    shares: BatchShares
    encode: Callable[[AnyBatch], Batch]
    flow_loss: FlowLoss
    optimizer: torch.optim.AdamW
    checkpoints: Checkpoints
    observer: Observer
    sampler: GridSampler
    stop: StopRequest
    run: RunState
    bad_step: Tensor  # on the device: the first step whose gradient norm was not finite
    samples_at_start: int


def train(config: RunConfig, paths: RunPaths, world: World) -> RunState:
    """Train until the last step, the target or a request to stop; return the run's last state.

    Resumes from the newest complete checkpoint in ``paths.output``. Raises StoppedError if asked to stop
    (a checkpoint is saved), DivergedError if the loss or the gradients are no longer finite.
    """
    with ExitStack() as stack:
        trainer = _prepare(config, paths, world, stack)
        trainer.observer.ready()
        batches = _training_batches(trainer)  # reads samples from here on
        if config.evaluation.at_start and trainer.run.step == 0:
            _evaluate(trainer)
        while trainer.run.status == "running":
            _step(trainer, batches)
        trainer.checkpoints.finish()
        trainer.observer.finished(trainer.run)
        return trainer.run


def _prepare(config: RunConfig, paths: RunPaths, world: World, stack: ExitStack) -> Trainer:
    stop = StopRequest(world)
    stop.listen()
    stack.callback(stop.settle)
    observer = stack.enter_context(Observer(config, paths, world))
    folder = paths.output / CHECKPOINTS_FOLDER
    newest = checkpoint.latest(folder)
    if newest is not None:
        checkpoint.check_same_run(config, newest)
    sources, shares = open_sources(config, paths.data), BatchShares.of(config, world.size)
    encode = batch_encoder(config, paths.models, world.device)
    published = None if newest else published_weights(config, paths.models)
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
    num_parameters = sum(p.numel() for p in model.parameters())
    observer.begin(run, num_parameters, shares, len(sources.train), len(sources.validation))
    gc.collect()
    gc.freeze()  # these objects live to the end: later collections need not visit them
    stack.callback(gc.unfreeze)
    return Trainer(
        config,
        world,
        sources,
        shares,
        encode,
        FlowLoss(model, config, DTYPES[config.precision.compute]),
        optimizer,
        checkpoints,
        observer,
        GridSampler(config, paths, world, sources),
        stop,
        run,
        bad_step=torch.tensor(optim.NEVER, device=world.device),
        samples_at_start=run.samples,
    )


def _training_batches(trainer: Trainer) -> Iterator[AnyBatch]:
    return training_batches(
        trainer.config,
        trainer.sources,
        trainer.shares,
        trainer.world.rank,
        first_batch=trainer.run.step,
        pin=trainer.world.device.type == "cuda",
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
    norm = full_tensor(optim.clip_gradients(parameters, config.optim.max_grad_norm))
    trainer.bad_step = optim.first_bad_step(trainer.bad_step, norm, step)
    optim.update(trainer.optimizer, trainer.bad_step)
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.run = run = replace(run, step=step, samples=step * config.schedule.global_batch_size)
    trainer.observer.step_done(step)

    # once in a while: read loss and norm (the only waits for the device), evaluate, sample, save
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
        _sample(trainer)
    every = config.checkpoint.every_steps
    if stop or over or (every and step % every == 0):
        _save(trainer, totals, wait=stop or over)
    if stop and not over:
        raise StoppedError(
            f"stopped after step {step}; a checkpoint is saved, the same command resumes"
        )


def _accumulate(trainer: Trainer, batches: Iterator[AnyBatch]) -> Tensor:
    """Sum gradients over this rank's micro batches; return (sum of losses, samples used)."""
    observer, shares = trainer.observer, trainer.shares
    per_rank = shares.global_batch_size / shares.num_ranks
    totals, used = torch.zeros(2, device=trainer.world.device), list[int]()
    for _ in range(shares.accumulation_steps):
        with observer.waiting_for_data():
            batch = next(batches)
        observer.faults(batch.faults)
        moved = trainer.encode(batch)
        losses = trainer.flow_loss(moved) * moved.weights
        # Ranks' gradients are averaged, so each divides by an equal part of the global batch.
        torch.autograd.backward(losses.sum() / per_rank)
        totals[0] += losses.detach().sum()
        totals[1] += moved.weights.sum()
        used += batch.indices[batch.indices != PADDING].tolist()
    observer.used(trainer.run.step + 1, used)
    return totals


def _log(trainer: Trainer, totals: Tensor, norm: Tensor, rate: float) -> None:
    observer, run = trainer.observer, trainer.run
    loss_sum, samples = trainer.world.all_sum(totals.clone()).tolist()
    loss = loss_sum / max(samples, 1.0)
    observer.metrics.train_loss.set(loss)  # before it is checked: an alert asks for NaN
    _require_finite(trainer, loss)
    used = run.samples - trainer.samples_at_start
    require_few_bad_samples(
        trainer.config, trainer.world, observer.num_faults, used, observer.last_fault
    )
    observer.step_facts(StepFacts(run.step, run.samples, loss, norm.item(), rate))


def _evaluate(trainer: Trainer) -> None:
    """Evaluate; the run ends with success if the target is reached."""
    _require_finite(trainer)
    config, world, model = trainer.config, trainer.world, trainer.flow_loss.model
    advance = trainer.observer.evaluation_begins(trainer.run)
    model.eval()
    batches = evaluation_batches(config, trainer.sources.validation, world.rank, world.size)
    result = evaluate(trainer.flow_loss, map(trainer.encode, batches), world, advance)
    model.train()
    trainer.observer.left_out(result)
    require_readable(result, config)
    _require_finite(trainer, result.loss, "evaluation")
    trainer.run = replace(trainer.run, eval_loss=result.loss)
    target = config.evaluation.target_loss
    if target is not None and result.loss <= target and trainer.run.step > 0:
        trainer.run = replace(trainer.run, status="success")
    trainer.observer.evaluation_done(trainer.run, result)


def _sample(trainer: Trainer) -> None:
    _require_finite(trainer)
    with trainer.observer.sampling(trainer.run.step) as path:
        trainer.sampler.write(
            trainer.flow_loss, path, trainer.run.step, alive=trainer.observer.alive
        )


def _save(trainer: Trainer, totals: Tensor, wait: bool) -> None:
    """Save, unless loss or gradients are not finite: the last good checkpoint must stay the newest."""
    _require_finite(trainer, trainer.world.all_sum(totals.clone())[0].item())
    trainer.run = replace(trainer.run, train_seconds=trainer.observer.train_seconds)
    with trainer.observer.saving(trainer.run):
        trainer.checkpoints.save(trainer.run)
        if wait:
            trainer.checkpoints.finish()


def _require_finite(trainer: Trainer, loss: float = 0.0, kind: str = "training") -> None:
    require_finite(trainer.bad_step, trainer.checkpoints, trainer.run.step, loss, kind)
