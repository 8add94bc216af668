"""The training loop: prepare, step, evaluate, sample, save."""

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
from fluxtrain.report.observer import Observer
from fluxtrain.report.run_logs import StepMetrics
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
    bad_step: Tensor  # on the device: the first step with a gradient norm that is not finite
    samples_at_start: int


def train(config: RunConfig, paths: RunPaths, world: World) -> RunState:
    """Train until the last step, the target loss or a stop request; return the final state of the run.

    Resumes from the newest complete checkpoint in ``paths.output``. Raises StoppedError after a stop request
    (a checkpoint is saved), DivergedError if the loss or the gradients are not finite.
    """
    with ExitStack() as stack:
        trainer = _prepare(config, paths, world, stack)
        trainer.observer.on_train_begin()
        batches = _training_batches(trainer)  # starts to read samples
        if config.evaluation.at_start and trainer.run.step == 0:
            _evaluate(trainer)
        while trainer.run.status == "running":
            _step(trainer, batches)
        trainer.checkpoints.finish()
        trainer.observer.on_train_end(trainer.run)
        return trainer.run


def _prepare(config: RunConfig, paths: RunPaths, world: World, stack: ExitStack) -> Trainer:
    stop = StopRequest(world)
    stop.install()
    stack.callback(stop.finish)
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
        on_saved=observer.on_saved,
        alive=observer.alive,
    )
    num_parameters = sum(p.numel() for p in model.parameters())
    observer.open_logs(run, num_parameters, shares, len(sources.train), len(sources.validation))
    gc.collect()
    gc.freeze()  # these objects live as long as the process: later collections skip them
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
    """Take one optimizer step; then log, evaluate, sample and save if due."""
    config, observer = trainer.config, trainer.observer
    step = trainer.run.step + 1
    observer.on_step_begin(step)
    totals = _accumulate(trainer, batches)
    norm = _update(trainer, step)
    samples = step * config.schedule.global_batch_size
    trainer.run = replace(trainer.run, step=step, samples=samples)
    observer.on_step_end(step)

    # everything below that reads the loss or the norm waits for the device
    last = step == config.schedule.steps
    if last or _is_due(step, config.logging.every_steps):
        _log(trainer, totals, norm)
    if _is_due(step, config.evaluation_steps) or (last and config.evaluation.at_end):
        _evaluate(trainer)
    stop = trainer.stop.agree()
    if last and trainer.run.status == "running":
        missed = config.evaluation.target_loss is not None
        trainer.run = replace(trainer.run, status="aborted" if missed else "success")
    over = trainer.run.status != "running"
    if over:
        observer.on_run_stop(trainer.run)
    if _is_due(step, config.sampling.every_steps) or (over and config.sampling.at_end):
        _sample(trainer)
    if stop or over or _is_due(step, config.checkpoint.every_steps):
        _save(trainer, totals, wait=stop or over)
    if stop and not over:
        raise StoppedError(
            f"stopped after step {step}; a checkpoint is saved, the same command resumes"
        )


def _is_due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


def _accumulate(trainer: Trainer, batches: Iterator[AnyBatch]) -> Tensor:
    """Sum the gradients of this rank's micro batches; return (sum of losses, number of samples)."""
    observer, shares = trainer.observer, trainer.shares
    per_rank = shares.global_batch_size / shares.num_ranks
    totals, used = torch.zeros(2, device=trainer.world.device), list[int]()
    for _ in range(shares.accumulation_steps):
        with observer.waiting_for_data():
            batch = next(batches)
        observer.log_unreadable(batch.faults)
        encoded = trainer.encode(batch)
        losses = trainer.flow_loss(encoded) * encoded.weights
        # gradients are averaged over the ranks, so each rank divides by its part of the global batch
        torch.autograd.backward(losses.sum() / per_rank)
        totals[0] += losses.detach().sum()
        totals[1] += encoded.weights.sum()
        used += batch.indices[batch.indices != PADDING].tolist()
    observer.log_used(trainer.run.step + 1, used)
    return totals


def _update(trainer: Trainer, step: int) -> Tensor:
    """Clip the gradients and take the optimizer step; return the gradient norm, still on the device."""
    config, optimizer = trainer.config, trainer.optimizer
    optim.set_learning_rate(optimizer, optim.learning_rate(step, config.optim, config.schedule))
    parameters = trainer.flow_loss.model.parameters()
    norm = full_tensor(optim.clip_gradients(parameters, config.optim.max_grad_norm))
    trainer.bad_step = optim.first_bad_step(trainer.bad_step, norm, step)
    optim.update(optimizer, trainer.bad_step)
    optimizer.zero_grad(set_to_none=True)
    return norm


def _log(trainer: Trainer, totals: Tensor, norm: Tensor) -> None:
    config, observer, run = trainer.config, trainer.observer, trainer.run
    loss_sum, num_samples = trainer.world.all_sum(totals.clone()).tolist()
    loss = loss_sum / max(num_samples, 1.0)
    observer.metrics.train_loss.set(loss)  # before the check: an alert fires on NaN
    _require_finite(trainer, loss)
    num_used = run.samples - trainer.samples_at_start
    num_bad, last_fault = observer.num_unreadable, observer.last_fault
    require_few_bad_samples(config, trainer.world, num_bad, num_used, last_fault)
    rate = optim.learning_rate(run.step, config.optim, config.schedule)
    observer.log_step(StepMetrics(run.step, run.samples, loss, norm.item(), rate))


def _evaluate(trainer: Trainer) -> None:
    """Evaluate; the run ends with success if the target is reached."""
    _require_finite(trainer)
    config, world, model = trainer.config, trainer.world, trainer.flow_loss.model
    advance = trainer.observer.on_evaluate_begin(trainer.run)
    model.eval()
    batches = evaluation_batches(config, trainer.sources.validation, world.rank, world.size)
    result = evaluate(trainer.flow_loss, map(trainer.encode, batches), world, advance)
    model.train()
    trainer.observer.log_unreadable_validation(result)
    require_readable(result, config)
    _require_finite(trainer, result.loss, "evaluation")
    trainer.run = replace(trainer.run, eval_loss=result.loss)
    target = config.evaluation.target_loss
    if target is not None and result.loss <= target and trainer.run.step > 0:
        trainer.run = replace(trainer.run, status="success")
    trainer.observer.on_evaluate_end(trainer.run, result)


def _sample(trainer: Trainer) -> None:
    _require_finite(trainer)
    step, alive = trainer.run.step, trainer.observer.alive
    with trainer.observer.sampling(step) as path:
        trainer.sampler.write(trainer.flow_loss, path, step, alive=alive)


def _save(trainer: Trainer, totals: Tensor, wait: bool) -> None:
    """Save a checkpoint; raise DivergedError instead if the loss or the gradients are not finite."""
    _require_finite(trainer, trainer.world.all_sum(totals.clone())[0].item())
    trainer.run = replace(trainer.run, train_seconds=trainer.observer.train_seconds)
    with trainer.observer.saving(trainer.run):
        trainer.checkpoints.save(trainer.run)
        if wait:
            trainer.checkpoints.finish()


def _require_finite(trainer: Trainer, loss: float = 0.0, kind: str = "training") -> None:
    require_finite(trainer.bad_step, trainer.checkpoints, trainer.run.step, loss, kind)
