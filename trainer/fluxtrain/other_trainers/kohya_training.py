"""Options of kohya's sd-scripts for the optimizer, the length of the training, and its draws and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fluxtrain.other_trainers import common, copies, kohya_clip
from fluxtrain.other_trainers import kohya_values as values
from fluxtrain.other_trainers.optimizers import FIELDS
from fluxtrain.other_trainers.option import (
    Option,
    automatic,
    each,
    field,
    fields,
    inert,
    missing,
)
from fluxtrain.other_trainers.reading import Reading

_NO_EFFECT = "sd-scripts accepts it, and draws and weighs FLUX.1's noise without it"
_OFFSET = f"{_NO_EFFECT}; flow.noise_offset has an effect"
_SETTINGS = values.OPTIMIZERS


def _setting(
    path: str,
    default: object = None,
    note: str = "",
    only: tuple[str, ...] = (),
    read: Callable[[Reading, str], object] = Reading.number,
) -> Option:
    """Return the row of a setting of the optimizer in use, or of the optimizers ``only``."""
    return fields([path], _SETTINGS.setting(path, *only, read=read), default, note)


_OPTIMIZER: Mapping[str, Option] = {
    "optimizer_type": fields(FIELDS, _SETTINGS.convert, "AdamW", "with its package's settings"),
    "use_8bit_adam": automatic("is optimizer_type=AdamW8bit"),
    "use_lion_optimizer": automatic("is optimizer_type=Lion"),
    "learning_rate": _setting("optim.learning_rate", default=2e-6),
    "unet_lr": _setting("optim.learning_rate", note="wins over learning_rate"),
    "text_encoder_lr": fields(
        [kohya_clip.RATE], kohya_clip.text_encoder_rate, note="over unet_lr or learning_rate"
    ),
    "optimizer_args.weight_decay": _setting("optim.weight_decay"),
    "optimizer_args.betas": fields(["optim.beta1", "optim.beta2"], _SETTINGS.betas),
    "optimizer_args.eps": _setting(
        "optim.epsilon", only=("adamw", "prodigy", "schedule_free_adamw")
    ),
    "optimizer_args.d_coef": _setting("optim.prodigy.d_coef", only=("prodigy",)),
    "optimizer_args.d0": _setting("optim.prodigy.d0", only=("prodigy",)),
    "optimizer_args.growth_rate": _setting("optim.prodigy.growth_rate", only=("prodigy",)),
    "optimizer_args.use_bias_correction": _setting(
        "optim.prodigy.bias_correction", only=("prodigy",), read=Reading.flag
    ),
    "optimizer_args.safeguard_warmup": _setting(
        "optim.prodigy.safeguard_warmup", only=("prodigy",), read=Reading.flag
    ),
    **each(
        "optimizer_args.decouple optimizer_args.relative_step optimizer_args.scale_parameter "
        "optimizer_args.warmup_init",
        automatic(
            "is part of optimizer_type: only those of our optimizers' kind have a counterpart"
        ),
    ),
    "lr_scheduler": fields(
        ["schedule.decay", "schedule.min_learning_rate"], values.schedule, "constant"
    ),
    "lr_warmup_steps": fields(
        ["schedule.warmup_steps"], values.warmup, 0, "below 1: a fraction of the steps"
    ),
    "lr_scheduler_min_lr_ratio": fields(["schedule.min_learning_rate"], values.least_rate),
    "lr_scheduler_num_cycles": fields(
        ["schedule.cycles"],
        values.of_schedule("cosine_with_restarts", "schedule.cycles", Reading.positive),
        note="does nothing with any schedule but cosine_with_restarts",
    ),
    "lr_scheduler_power": fields(
        ["schedule.power"],
        values.of_schedule("polynomial", "schedule.power", Reading.number),
        note="does nothing with any schedule but polynomial",
    ),
    "lr_decay_steps": inert("only warmup_stable_decay uses it"),
    "lr_scheduler_type": missing("schedules of other packages are not loaded"),
    "lr_scheduler_args": missing("schedules of other packages are not loaded"),
    "max_grad_norm": fields(["optim.max_grad_norm"], common.no_clipping_at_zero, 1.0, "0: none"),
    **each(
        "blockwise_fused_optimizers fused_backward_pass fused_optimizer_groups",
        missing("the update is one for all weights; FSDP2 shards its states"),
    ),
    "blocks_to_swap": fields(
        ["parallel.offload_blocks"],
        values.swapped_blocks,
        note="of n: n/2 double blocks, twice the rest of single ones, and 2 that have buffers",
    ),
    **each(
        "single_blocks_to_swap double_blocks_to_swap",
        missing("parallel.offload_blocks is of weights that are not trained", 0),
    ),
    "cpu_offload_checkpointing": missing(
        "activations stay on the GPU; parallel.activation_checkpointing recomputes them"
    ),
    "mem_eff_save": missing("a checkpoint is written from a copy in host memory"),
}
_LENGTH: Mapping[str, Option] = {
    "train_batch_size": fields(
        ["schedule.global_batch_size", "parallel.micro_batch_size"],
        common.batch(values.BATCH, values.ACCUMULATION),
        1,
        "times gradient_accumulation_steps and --gpus",
    ),
    "gradient_accumulation_steps": automatic("is part of schedule.global_batch_size"),
    "max_train_steps": fields(["schedule.steps"], values.steps, 1600),
    "max_train_epochs": fields(
        ["schedule.epochs", "schedule.steps"],
        values.epochs,
        note="with --epoch-samples, images times repeats: steps",
    ),
    "seed": fields(["seed"], values.seed, "random"),
    **each(
        "initial_step initial_epoch skip_until_initial_step", automatic("a run resumes exactly")
    ),
}
_FLOW: Mapping[str, Option] = {
    "timestep_sampling": fields(
        [
            "flow.timestep_sampling",
            "flow.sigmoid_scale",
            "flow.shift",
            "flow.logit_mean",
            "flow.logit_std",
            "flow.mode_scale",
        ],
        values.timesteps,
        "sigma",
        "sigma only with discrete_flow_shift=1",
    ),
    "sigmoid_scale": fields(
        ["flow.sigmoid_scale"],
        values.only_with("timestep_sampling", "sigmoid", "shift", "flux_shift"),
        1.0,
    ),
    "discrete_flow_shift": fields(
        ["flow.shift"],
        values.only_with("timestep_sampling", "shift", "sigma"),
        3.0,
        "only with timestep_sampling=shift and sigma",
    ),
    "weighting_scheme": fields([], values.scheme, "uniform", "is part of timestep_sampling=sigma"),
    **{
        name: fields([f"flow.{name}"], values.only_with("timestep_sampling", "sigma"), default)
        for name, default in (("logit_mean", 0.0), ("logit_std", 1.0), ("mode_scale", 1.29))
    },
    "model_prediction_type": fields([], values.prediction, "sigma_scaled", "always raw"),
    "guidance_scale": field("flow.guidance", Reading.number, 3.5),
    "loss_type": missing("the loss is the squared error", "l2"),
    "noise_offset": inert(_OFFSET),
    **each(
        "noise_offset_random_strength adaptive_noise_scale multires_noise_iterations "
        "multires_noise_discount min_snr_gamma scale_v_pred_loss_like_noise_pred v_pred_like_loss "
        "debiased_estimation_loss zero_terminal_snr ip_noise_gamma_random_strength huber_c "
        "huber_schedule huber_scale min_timestep max_timestep",
        inert(_NO_EFFECT),
    ),
    "ip_noise_gamma": missing("the model's input is not perturbed", 0),
    "prior_loss_weight": fields(
        ["data.prior_loss_weight"], copies.prior_weight, note="of is_reg in dataset_config"
    ),
    "masked_loss": automatic("data.masks; conditioning_data_dir of dataset_config is read"),
    "alpha_mask": fields(["data.masks"], copies.alpha_masks, note="the pictures' opacity"),
}

TRAINING: Mapping[str, Option] = {**_OPTIMIZER, **_LENGTH, **_FLOW}
"""In the order of reports."""
