"""The training loop: prepare, step, evaluate, sample, save."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain import optim
from fluxtrain.adapter.opening import initial_parameters
from fluxtrain.adapter.training_files import write_file
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.closed_division import begins_closed, wrong_sets
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.presets import MLPERF_VALIDATION_SET
from fluxtrain.data.dataset import Batch
from fluxtrain.data.loader import (
    DeviceBatches,
    EvaluationData,
    evaluation_batch_size,
    evaluation_batches,
    training_batches,
    training_order,
)
from fluxtrain.data.order import PADDING, BatchShares, BucketOrder
from fluxtrain.data.sources import Sources
from fluxtrain.encode.clip import clip_weights
from fluxtrain.encode.encoders import batch_encoder
from fluxtrain.errors import DivergedError, StoppedError
from fluxtrain.model.clip import CLIP_LENGTH, ClipWeights
from fluxtrain.model.flux import Flux
from fluxtrain.model.layers import rate_of
from fluxtrain.model.lora import magnitudes
from fluxtrain.model.loss import FlowLoss
from fluxtrain.model.parameters import described_parameters
from fluxtrain.optim import learning_rate
from fluxtrain.parallel.compile import (
    CompileCache,
    attention_backend,
    attention_on,
    compiles,
    kernels_on,
    missing_compiler,
)
from fluxtrain.parallel.distributed import StopRequest, World
from fluxtrain.parallel.parallelize import DTYPES, build_model, free_gathered, observe_waits
from fluxtrain.parallel.preflight import run_preflight
from fluxtrain.parallel.sharding import whole
from fluxtrain.report.observer import Observer
from fluxtrain.runtime.devices import lacks_bfloat16
from fluxtrain.runtime.progress import Alive
from fluxtrain.sample.grid import GridSampler
from fluxtrain.sample.prompts import check_sampling
from fluxtrain.state import checkpoint
from fluxtrain.state.checkpoint import Checkpoints
from fluxtrain.state.folder import CheckpointFolder
from fluxtrain.state.recovery import Recovery
from fluxtrain.state.run_state import RunState
from fluxtrain.train import step as optimizer_step
from fluxtrain.train.evaluate import (
    count_bad_samples,
    evaluate,
    require_few_bad_samples,
    require_readable,
    unread_samples,
    unread_validation,
)
from fluxtrain.train.sources import run_sources, with_steps
from fluxtrain.train.step import require_finite
from fluxtrain.weights.reader import published_weights, settle_base


def train(config: RunConfig, paths: RunPaths, world: World) -> RunState:
    """Train until the last step, the target loss or a stop request; return the final state of the run.

    Resumes from the newest snapshot in memory or checkpoint in ``paths.output``. Raises StoppedError after a
    stop request (a checkpoint is saved), DivergedError if the loss or the gradients are not finite.
    """
    with ExitStack() as stack:
        trainer = _Trainer(config, paths, world, stack)
        trainer.train()
        return trainer.run


def take_steps(
    config: RunConfig, paths: RunPaths, world: World, count: int, sources: Sources | None = None
) -> None:
    """Take the first ``count`` steps of a longer run, on ``sources`` if given, log them and save nothing."""
    with ExitStack() as stack:
        _Trainer(config, paths, world, stack, sources).take_steps(count)


class _Trainer:
    """The parts of one training, and ``run``, its state after the last step."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        world: World,
        stack: ExitStack,
        sources: Sources | None = None,
    ) -> None:
        """Load or resume everything; ``stack`` closes it. ``sources`` replace those of ``config``."""
        self.paths, self.world = paths, world
        self.stop = StopRequest(world)
        self.stop.install()
        stack.callback(self.stop.finish)
        self.observer = observer = Observer(config, paths, world, stack)
        attention_on(world.device, config)  # a device that lacks it is refused
        stack.enter_context(attention_backend(config.parallel.attention))
        check_sampling(config, paths.data, paths.models)
        compute = DTYPES[config.precision.compute]
        clip = clip_weights(config, paths.models, compute)  # another encoder is refused
        run_preflight(config.preflight, world, paths.output, observer.alive)
        recovery = Recovery(config, paths, world, observer.alive)
        self.shares = BatchShares.of(config, world.size)
        self._open_sources = partial(
            run_sources, config, paths, world, self.stop, observer.alive, recovery.is_new
        )
        self._sources = sources
        # in the closed division the clock starts before data are touched
        if not begins_closed(config, paths.num_nodes):
            self._sources = self._sources or self._open_sources()
            config = with_steps(config, self._sources, world)
            observer.use(config)
        self.config = config
        self.encode = batch_encoder(config, paths.models, world.device)
        self.model = initial_model(config, paths, world, recovery.is_new, clip, observer.alive)
        if world.size > 1:
            observe_waits(self.model, observer.step_times)
        self.flow_loss = FlowLoss(self.model, config, compute)
        self.optimizer = optim.make_optimizer(
            *(self.model, config.optim, compute),
            partial(rate_of, adapter=config.adapter),
            config.drawn_seed,
            accumulates=self.shares.accumulation_steps > 1,
            fused="optimizer" in kernels_on(world.device, config),
        )
        # on the device: the first step with a gradient norm that is not finite
        self.bad_step = torch.tensor(optim.NEVER, device=world.device)
        state = checkpoint.training_state(self.model, self.optimizer)
        self.run = recovery.load(state, observer.alive).continued(config)
        self.optimizer.resume(self.run.step)
        self.samples_at_start = self.run.samples
        self.checkpoints = Checkpoints(
            CheckpointFolder(recovery.fence),
            state,
            config,
            world.is_main,
            saved_step=recovery.saved_step,
            on_saved=observer.on_saved,
            on_stall=observer.metrics.checkpoint_stall.inc,
            alive=observer.alive,
        )
        self.snapshots = recovery.snapshots(
            state, self.run, observer.on_snapshot, observer.on_snapshot_memory
        )
        if self.snapshots is not None:
            stack.enter_context(self.snapshots.watching_memory())
        observer.open_logs(
            recovery.fence,
            self.run,
            recovery.saved_step,
            described_parameters(self.model),
            self.shares,
            *(self._sources.lengths if self._sources else ()),
        )
        gc.collect()
        gc.freeze()  # these objects live as long as the process: later collections skip them
        stack.callback(gc.unfreeze)

    def train(self) -> None:
        """Take steps until the run is over."""
        batches = self._begin()
        if self.config.evaluation.at_start and self.run.step == 0:
            self._evaluate()
        if self.config.sampling.at_start and self.run.step == 0:
            self._sample()
        try:
            while self.run.status == "running":
                self._step(batches)
        except (StoppedError, DivergedError):  # of all ranks
            self._finish_snapshots()
            raise
        self._finish_snapshots()
        self.checkpoints.finish()
        self.observer.on_train_end(self.run)

    def take_steps(self, count: int) -> None:
        """Take ``count`` steps, of which none may be the last of the run."""
        batches = self._begin()
        for _ in range(count):
            self._step(batches)

    def _begin(self) -> DeviceBatches:
        """Compile, start MLPerf's clock and return this rank's batches."""
        if self.run.status == "running":
            self._warm_up()
        self.observer.on_train_begin()
        sources = self._open_data()
        batches = training_batches(  # starts to read samples
            self.config,
            sources,
            self.shares,
            self.world.rank,
            first_batch=self.run.step,
            pin=self._pin,
        )
        if sources.validation is not None and self.config.evaluation.is_on:
            # a fork while a checkpoint is written could leave a lock of libc locked in a loader process
            self.validation.begin()
        return DeviceBatches(batches, self.world.device)

    def _open_data(self) -> Sources:
        """Return the data sets, which a run of the closed division opens here, on the clock; log them."""
        config, world = self.config, self.world
        sources = self._sources = self._sources or self._open_sources()
        if config.logging.mlperf.division == "auto":
            for violation in wrong_sets(*sources.lengths):
                self.observer.on_rule_broken(violation, self.run)
        if sources.validation is not None:
            validation = evaluation_batches(
                config, sources.validation, world.rank, world.size, pin=self._pin
            )
            self.validation = EvaluationData(validation, world.device)
        self.sampler = GridSampler(config, self.paths, world, sources)
        self.order = training_order(config, sources.train)
        self.observer.on_data_opened(sources, self.order)
        return sources

    def _warm_up(self) -> None:
        """Compile, and let the device load its libraries, before MLPerf's clock starts."""
        world = self.world
        count = self._sources.lengths[1] if self._sources else MLPERF_VALIDATION_SET
        evaluates = self.config.evaluation.is_on
        size = evaluation_batch_size(self.config, count, world.size) if evaluates else None
        sizes = self.shares.micro_batch_size, size
        if is_needed(self.config, world):
            self.observer.on_warm_up()
            prepare(self.flow_loss, sizes, world, self.paths.output, self.observer.alive)

    def _step(self, batches: DeviceBatches) -> None:
        """Take one optimizer step; then log, evaluate, sample and save if due."""
        config, observer = self.config, self.observer
        step = self.run.step + 1
        observer.on_step_begin(self.run, self._image_tokens)
        last = step == config.schedule.steps
        evaluates = _is_due(step, config.evaluation_steps) or (last and config.evaluation.at_end)
        if evaluates:
            self.validation.begin()
        totals = self._accumulate(batches)
        norm = self._update(step)
        samples = self.order.samples(step)
        self.run = replace(self.run, step=step, samples=samples)
        observer.on_step_end(step)
        with observer.waiting_for_data():
            batches.stage()

        # everything below that reads the loss or the norm waits for the device
        if last or _is_due(step, config.logging.every_steps):
            self._log(totals, norm)
        if evaluates:
            self._evaluate()
        stop = self.stop.agree()
        if last and self.run.status == "running":
            missed = config.evaluation.target_loss is not None
            self.run = replace(self.run, status="aborted" if missed else "success")
        over = self.run.status != "running"
        if over:
            observer.on_run_stop(self.run)
        if _is_due(step, config.sampling.every_steps) or (over and config.sampling.at_end):
            self._sample()
        self._write_adapter(is_last=over)  # before the checkpoint that a restart would continue
        if stop or over or _is_due(step, config.checkpoint.every_steps):
            self._save(totals, wait=stop or over)
        if self.snapshots is not None and not (stop or over):
            self.snapshots.after_step(self._timed(), self.bad_step)
        if stop and not over:
            raise StoppedError(
                f"stopped after step {step}; a checkpoint is saved, the same command resumes"
            )

    def _accumulate(self, batches: DeviceBatches) -> Tensor:
        """Sum the gradients of this rank's micro batches; return (sum of losses, number of samples)."""
        # of a whole batch, also if this one has fewer samples: each weighs equally
        per_rank = self.shares.global_batch_size / self.shares.num_ranks
        totals, used = torch.zeros(2, device=self.world.device), list[int]()
        shares = self.shares.of_batch(self.order.count(self.run.step))
        for number in range(1, shares.accumulation_steps + 1):
            with self.observer.waiting_for_data():
                batch = next(batches)
            self.observer.log_unreadable(batch.faults)
            losses, weights = optimizer_step.add_gradients(
                *(self.flow_loss, self.encode, batch, per_rank, self.observer.step_times),
                is_last=number == shares.accumulation_steps,
            )
            totals[0] += losses.sum()
            totals[1] += weights.sum()
            used += batch.indices[batch.indices != PADDING].tolist()
        self.observer.log_used(self.run.step + 1, used)
        return totals

    def _update(self, step: int) -> Tensor:
        """Clip the gradients and take the optimizer step; return the gradient norm, still on the device."""
        norm, self.bad_step = optimizer_step.update(
            self.optimizer,
            self.config,
            step,
            self.bad_step,
            self.observer.step_times,
            self.checkpoints.before_update,
        )
        return norm

    def _log(self, totals: Tensor, norm: Tensor) -> None:
        config, observer, run = self.config, self.observer, self.run
        loss_sum, num_samples = self.world.all_sum(totals.clone()).tolist()
        loss = loss_sum / max(num_samples, 1.0)
        observer.metrics.of_step["train_loss"].set(loss)  # before the check: an alert fires on NaN
        self._require_finite(loss)
        num_used = run.samples - self.samples_at_start
        num_bad, last_fault = observer.num_unreadable, observer.last_fault
        if bad := count_bad_samples(self.world, num_bad):
            observer.on_rule_broken(unread_samples(bad, num_used, last_fault), run)
        require_few_bad_samples(config, bad, num_used, last_fault)
        rate = learning_rate(run.step, config.optim, config.schedule)
        rate *= self.optimizer.step_size.item()
        observer.log_step(run, loss, norm.item(), rate)

    def _evaluate(self) -> None:
        """Evaluate; the run ends with success if the target is reached."""
        self._require_finite()
        config, world = self.config, self.world
        advance = self.observer.on_evaluate_begin(self.run)
        self.model.eval()
        batches = map(self.encode, self.validation)
        with self._evaluated():
            result = evaluate(self.flow_loss, batches, world, advance)
        self.model.train()
        self.observer.log_unreadable_validation(result)
        if result.faults:
            self.observer.on_rule_broken(unread_validation(result), self.run)
        require_readable(result, config)
        self._require_finite(result.loss, "evaluation")
        self.run = replace(self.run, eval_loss=result.loss)
        target = config.evaluation.target_loss
        if target is not None and result.loss <= target and self.run.step > 0:
            self.run = replace(self.run, status="success")
        self.observer.on_evaluate_end(self.run, result)

    def _sample(self) -> None:
        self._require_finite()
        with self.observer.sampling(self.run.step) as path, self._evaluated():
            alive = self.observer.alive
            is_written = self.sampler.write(self.flow_loss, path, self.run.step, alive)
        if is_written:
            self.observer.on_sampled(self.run.step, path)

    @contextmanager
    def _evaluated(self) -> Iterator[None]:
        """Give the model the weights inside that the run is judged by."""
        if self.optimizer.averages:
            self.checkpoints.before_update()  # they are exchanged where they are
        with self.optimizer.evaluated():
            yield
            if self.optimizer.averages:
                free_gathered(self.model)

    def _write_adapter(self, is_last: bool) -> None:
        """Write the adapter for other tools if that is due."""
        config, step = self.config, self.run.step
        if config.adapter is None:
            return
        if is_last or _is_due(step, config.adapter_file.every_steps):
            self._require_finite()
            free_gathered(self.model)  # after an evaluation the model may have them as parameters
            parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            judged = {n: whole(self.optimizer.judged(p)) for n, p in parameters.items()}
            if self.world.is_main:
                write_file(
                    self.paths.output, config, judged | magnitudes(self.model), step, is_last
                )

    def _save(self, totals: Tensor, wait: bool) -> None:
        """Save a checkpoint; raise DivergedError instead if the loss or the gradients are not finite."""
        self._require_finite(self.world.all_sum(totals.clone())[0].item())
        self.run = self._timed()
        with self.observer.saving(self.run):
            self.checkpoints.save(self.run)
            if wait:
                self.checkpoints.finish()

    @property
    def _image_tokens(self) -> int:
        """Return the image tokens of each sample of the next step."""
        if not isinstance(self.order, BucketOrder):
            return self.config.image_tokens
        return self.config.model.image_tokens(*self.order.latent_size(self.run.step))

    @property
    def _pin(self) -> bool:
        return self.world.device.type == "cuda"

    def _timed(self) -> RunState:
        """Return the state of the run with the seconds spent until now."""
        return replace(self.run, train_seconds=self.observer.train_seconds)

    def _finish_snapshots(self) -> None:
        if self.snapshots is not None:
            self.snapshots.finish()

    def _require_finite(self, loss: float = 0.0, kind: str = "training") -> None:
        require_finite(self.bad_step, self.checkpoints, self.run.step, loss, kind)


def _is_due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


def initial_model(
    config: RunConfig,
    paths: RunPaths,
    world: World,
    is_new: bool,
    clip: ClipWeights | None,
    alive: Alive,
) -> Flux:
    """Return the model of a run that begins if ``is_new``; else without what its checkpoint has.

    ``clip`` is the encoder whose adapters are trained. Raises DataError if weights or adapters are missing,
    do not fit, or are others than those that the run began with.
    """

    def tell(text: str) -> None:
        if world.is_main:
            print(f"fluxtrain: {text}", file=sys.stderr, flush=True)

    if config.precision.compute == "bfloat16" and lacks_bfloat16(world.device):
        tell("this CPU has no instructions for bfloat16; precision.compute: float32 is much faster")
    settle_base(config, paths, world, is_new)
    published = None
    if is_new or config.adapter is not None:  # adapters' checkpoints have no weights
        published = published_weights(config, paths.models, world, alive)
    adapters = initial_parameters(config, paths.models, tell) if is_new else {}
    return build_model(config, world, published, alive, adapters, clip)


# One pass of each shape before training, on synthetic data, so that no step waits for a compiler.
#
# MLPerf's clock has not started then: its rules allow passes on synthetic data. Nothing is left of
# them: no gradient, no changed weight, no random number drawn.


def is_needed(config: RunConfig, world: World) -> bool:
    """Return whether training waits for something at first: a compiler, or a GPU's libraries."""
    return world.device.type == "cuda" or compiles(config.parallel, world.device)


def prepare(
    flow_loss: FlowLoss,
    sizes: tuple[int, int | None],
    world: World,
    output: Path,
    alive: Alive = lambda: None,
) -> None:
    """Take the passes of `warm_up` with ``sizes``; use what the job in ``output`` has compiled before.

    Every rank must call it. Rank 0 prints why a model on GPUs is not compiled.
    """
    parallel, cache = flow_loss.config.parallel, None
    if compiles(parallel, world.device):
        cache = CompileCache.of(output, world.device, os.environ)
    elif parallel.compile is None and world.is_main:
        reason = missing_compiler(world.device)
        print(f"fluxtrain: blocks are not compiled: {reason}", file=sys.stderr, flush=True)
    is_cached = cache is not None and cache.load()
    warm_up(flow_loss, *sizes, world.device, alive)
    if cache is not None and not is_cached and world.node == 0:
        cache.save()


def warm_up(
    flow_loss: FlowLoss,
    training_size: int,
    evaluation_size: int | None,
    device: torch.device,
    alive: Alive = lambda: None,
) -> None:
    """Pass a training batch forward and backward, and an evaluation batch forward; every rank must call it.

    The sizes are samples of one batch; without an evaluation the second is None. ``alive`` is called after
    each pass.
    """
    model = flow_loss.model
    losses = flow_loss(synthetic_batch(flow_loss.config, training_size, device))
    alive()
    torch.autograd.backward(losses.sum())
    model.zero_grad(set_to_none=True)
    alive()
    if evaluation_size is not None:
        model.eval()
        with torch.no_grad():
            flow_loss(synthetic_batch(flow_loss.config, evaluation_size, device))
        model.train()
        alive()


def synthetic_batch(config: RunConfig, size: int, device: torch.device) -> Batch:
    """Return a batch of ``size`` samples of the run's shapes, all zero."""
    latents = torch.zeros(size, *config.latent_shape, device=device)
    noise = latents[:, : config.latent_channels]
    per_sample = torch.zeros(size, device=device)
    model = config.model
    vec = torch.zeros(size, model.vec_in_dim, device=device)
    if config.trains_clip:
        vec = torch.zeros(size, CLIP_LENGTH, dtype=torch.int32, device=device)
    return Batch(
        mean=latents,
        logvar=latents,
        txt=torch.zeros(size, config.data.text_length, model.context_in_dim, device=device),
        vec=vec,
        latent_noise=noise,
        noise=noise,
        timesteps=per_sample,
        weights=per_sample,
        keys=per_sample.long(),
        dropped=per_sample.bool(),
        indices=per_sample.long(),
    )
