"""The training steps that are compared, on one GPU: bfloat16 products, float32 weights and AdamW.

Every step samples latents, adds noise, predicts, differentiates, clips and updates. Torchtitan and diffusers
run their own models, wrappers and position ids; encoders are left out, as ours precomputes their outputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.gpu.setting import SCHNELL, Setting, device, random_batch, random_weights
from benchmarks.training.torchtitan_names import to_torchtitan
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain import optim
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.model.loss import sample_latents
from fluxtrain.parallel.distributed import World
from fluxtrain.parallel.parallelize import uses_fsdp

Step = Callable[[], Tensor]
"""Takes one optimizer step and returns the mean loss before it, on the device."""


@dataclass(frozen=True)
class Contender:
    """One way to take the step."""

    build: Callable[[Setting, World, Contender], Step]
    says: str
    """What the table's reader must know of it."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of our config, by dotted names."""
    compiled: bool = True
    recompute: bool = False
    needs_fsdp: bool = False
    """Differs from another contender only where FSDP2 divides our model."""

    def step(self, setting: Setting, world: World) -> Step:
        """Return the step at ``setting``."""
        return self.build(setting, world, self)


def fluxtrain(setting: Setting, world: World, contender: Contender) -> Step:
    """Return the step of this project's train.py."""
    from fluxtrain.model.loss import FlowLoss
    from fluxtrain.parallel.compile import kernels_on
    from fluxtrain.parallel.parallelize import DTYPES, build_model

    config = setting.config(contender.overrides)
    batch = random_batch(setting)
    model = build_model(config, world, random_weights(setting.model))
    compute = DTYPES[config.precision.compute]
    flow_loss = FlowLoss(model, config, compute)
    fused = "optimizer" in kernels_on(device(), config)
    optimizer = optim.make_optimizer(model, config.optim, compute, accumulates=False, fused=fused)
    bad_step = torch.tensor(optim.NEVER, device=device())

    def step() -> Tensor:
        nonlocal bad_step
        losses = flow_loss(batch) * batch.weights
        torch.autograd.backward(losses.sum() / len(batch))
        norm = optimizer.gradient_norm()
        bad_step = optim.first_bad_step(bad_step, norm, 1)
        optim.update(optimizer, norm, config.optim.max_grad_norm, bad_step)
        optimizer.zero_grad(set_to_none=True)
        return losses.detach().mean()

    return step


def torchtitan(setting: Setting, world: World, contender: Contender) -> Step:
    """Return the step of torchtitan's flux trainer, with its own ``fully_shard`` wrapping."""
    from torchtitan.models.flux.utils import create_position_encoding_for_latents, pack_latents

    model = _torchtitan_model(setting, world, contender)
    config, inputs = setting.config(), _Inputs(setting)
    optimizer = _adamw(model, config)

    def step() -> Tensor:
        with torch.no_grad():
            noisy = inputs.noisy()
            ids = create_position_encoding_for_latents(*noisy.shape[:1], *noisy.shape[2:])
            txt_ids = torch.zeros(len(noisy), setting.text, 3)
            packed = pack_latents(noisy).bfloat16()
            target = pack_latents(inputs.velocity)
        prediction = model(
            img=packed,
            img_ids=ids.to(noisy),
            txt=inputs.txt,
            txt_ids=txt_ids.to(noisy),
            y=inputs.vec,
            timesteps=inputs.batch.timesteps,
        )
        loss = F.mse_loss(prediction.float(), target.float())
        return _update(loss, model, optimizer, config)

    return step


def diffusers(setting: Setting, world: World, contender: Contender) -> Step:
    """Return the step of a plain loop with diffusers' model under autocast, as in its training scripts."""
    from benchmarks.reference_model import reference_of
    from diffusers import FluxPipeline

    model = reference_of(dict(random_weights(setting.model)), setting.model)
    model.train()
    if contender.recompute:
        model.enable_gradient_checkpointing()
    if contender.compiled:
        model.compile_repeated_blocks(fullgraph=True)
    config, inputs = setting.config(), _Inputs(setting)
    optimizer = _adamw(model, config)
    size, channels, side = setting.batch, setting.model.in_channels // 4, setting.latent

    def step() -> Tensor:
        noisy = inputs.noisy()
        with torch.autocast(device().type, torch.bfloat16):
            (prediction,) = model(
                hidden_states=FluxPipeline._pack_latents(noisy, size, channels, side, side),
                encoder_hidden_states=inputs.txt,
                pooled_projections=inputs.vec,
                timestep=inputs.batch.timesteps,
                img_ids=FluxPipeline._prepare_latent_image_ids(
                    size, side // 2, side // 2, noisy.device, noisy.dtype
                ),
                txt_ids=torch.zeros(setting.text, 3, device=noisy.device),
                return_dict=False,
            )
        prediction = FluxPipeline._unpack_latents(prediction, 8 * side, 8 * side, 8)
        loss = F.mse_loss(prediction.float(), inputs.velocity)
        return _update(loss, model, optimizer, config)

    return step


class _Inputs:
    """The batch as the peers take it."""

    def __init__(self, setting: Setting) -> None:
        self.batch = random_batch(setting)
        encoders = setting.config().encoders
        self.clean = sample_latents(
            self.batch.mean,
            self.batch.logvar,
            self.batch.latent_noise,
            encoders.latent_shift,
            encoders.latent_scale,
        )
        self.txt, self.vec = self.batch.txt.bfloat16(), self.batch.vec.bfloat16()

    @property
    def velocity(self) -> Tensor:
        return self.batch.noise - self.clean

    def noisy(self) -> Tensor:
        times = self.batch.timesteps.view(-1, 1, 1, 1)
        return (1 - times) * self.clean + times * self.batch.noise


def _adamw(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """Return fused AdamW with our hyperparameters, the default of both peers on GPUs."""
    hyper = config.optim
    return torch.optim.AdamW(
        model.parameters(),
        lr=hyper.learning_rate,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.epsilon,
        weight_decay=hyper.weight_decay,
        fused=True,
    )


def _update(
    loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, config: RunConfig
) -> Tensor:
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _torchtitan_model(setting: Setting, world: World, contender: Contender) -> nn.Module:
    """Return torchtitan's model with our random weights, wrapped as its flux trainer does."""
    with torch.device("meta"):
        model = _empty_torchtitan_model(setting)
    model.load_state_dict(to_torchtitan(dict(random_weights(setting.model))), assign=True)
    if contender.recompute:
        _recompute(model)
    if contender.compiled:
        for block in (*model.double_blocks, *model.single_blocks):
            block.compile(fullgraph=True)
    _shard_torchtitan(model, world)
    return model


def _empty_torchtitan_model(setting: Setting) -> nn.Module:
    double, single = setting.depth
    if version("torchtitan").startswith("0.2"):
        from torchtitan.models.attention import ScaledDotProductAttentionWrapper
        from torchtitan.models.flux import FluxModel, FluxModelArgs

        # its blocks leave the default, by which a token attends to those before it only
        ScaledDotProductAttentionWrapper.forward.__kwdefaults__["is_causal"] = False
        sizes = setting.model.model_dump(exclude={"condition", "guidance_embed", "qk_norm_eps"})
        return FluxModel(FluxModelArgs(out_channels=setting.model.in_channels, **sizes))
    from torchtitan.models.flux import flux_configs

    if setting.model.hidden_size != SCHNELL.hidden_size:
        raise ValueError("torchtitan 0.3 has the widths of FLUX.1 only")
    config = flux_configs["flux-schnell"]()
    return replace(
        config,
        depth=double,
        depth_single_blocks=single,
        double_blocks=config.double_blocks[:double],
        single_blocks=config.single_blocks[:single],
    ).build()


def _recompute(model: nn.Module) -> None:
    if version("torchtitan").startswith("0.2"):
        from torchtitan.models.flux.infra.parallelize import apply_ac

        apply_ac(model, SimpleNamespace(mode="full"))
    else:
        from torchtitan.models.flux.parallelize import apply_ac

        apply_ac(model)


def _shard_torchtitan(model: nn.Module, world: World) -> None:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the machine may have no other interface
    if version("torchtitan").startswith("0.2"):
        from torchtitan.models.flux.infra.parallelize import apply_fsdp
    else:
        from torchtitan.models.flux.parallelize import apply_fsdp
    apply_fsdp(model, world.mesh(1), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


TUNED = {"parallel.reshard_after_forward": False}
FP8 = {"precision.fp8": "tensorwise"}
CONTENDERS = {
    "fluxtrain": Contender(fluxtrain, "as shipped: the preset mlperf-schnell"),
    "fluxtrain-tuned": Contender(fluxtrain, "gathered weights are kept", TUNED, needs_fsdp=True),
    "fluxtrain-fp8": Contender(fluxtrain, "the blocks' products in fp8, one scale per tensor", FP8),
    "torchtitan-shipped": Contender(
        torchtitan,
        "all blocks recomputed, not compiled; 0.2.2 made to attend to all tokens",
        compiled=False,
        recompute=True,
    ),
    "torchtitan-best": Contender(
        torchtitan, "no recomputation; each block compiled (0.2 does not do so itself)"
    ),
    "diffusers-plain": Contender(
        diffusers, "gradient checkpointing, not compiled", compiled=False, recompute=True
    ),
    "diffusers-best": Contender(diffusers, "no recomputation; repeated blocks compiled"),
}
EQUAL = ("fluxtrain", "torchtitan-best", "diffusers-best")
"""Contenders with the same settings: no recomputation, each block compiled."""


def without_fsdp(needs: Mapping[str, bool], setting: Setting) -> list[str]:
    """Return the names that need FSDP2, if it does not divide our model on one GPU.

    They would measure another again.
    """
    if uses_fsdp(setting.config(), 1):
        return []
    return [name for name, is_needed in needs.items() if is_needed]
