"""The options of torchtitan's FLUX.1, and of MLPerf's reference on it, by section and name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fluxtrain.imports import common
from fluxtrain.imports.table import (
    Convert,
    NoCounterpartError,
    Option,
    Reading,
    Trainer,
    Values,
    automatic,
    each,
    field_option,
    fields,
    ignored,
    missing,
    set_outside,
)

_OF_MLPERF = {
    *("eval.dataset", "eval.dataset_path", "eval.target_eval_loss", "eval.batch_size"),
    *("encoder.empty_encodings_path", "encoder.autoencoder_shift", "encoder.autoencoder_scale"),
}
_ENCODED = {"cc12m_preprocessed", "coco_preprocessed"}
_ON_DISK = {"cc12m_disk", "coco"}
_IMAGES = {
    *("cc12m-wds", "cc12m-test", "cc12m_wds", "cc12m_wds_30k", "cc12m_test", "coco-validation"),
    *_ON_DISK,
}
_BLOCKS: Values = {"model.depth": 2, "model.depth_single_blocks": 2}
_DEBUG: Values = {**_BLOCKS, "model.hidden_size": 1536, "model.num_heads": 12}
"""Of flux-debug, which was as wide as FLUX.1 while ``batch_size`` had that name."""
_FLAVORS = ("flux-dev", "flux-schnell", "flux-debug")


def is_of_mlperf(options: Mapping[str, object]) -> bool:
    """Return whether ``options`` are those of MLPerf's reference, which has a preset here."""
    is_own = str(options.get("training.dataset")) in _ENCODED | _ON_DISK
    return is_own or not _OF_MLPERF.isdisjoint(options)


def _samples(reading: Reading) -> int:
    """Return the samples of a step on all GPUs."""
    if (size := int(reading.number("training.global_batch_size", -1))) not in (0, -1):
        return size
    degree = "parallelism.data_parallel_"
    replicas, shards = (
        int(reading.number(f"{degree}{kind}_degree", usual))
        for kind, usual in (("replicate", 1), ("shard", -1))
    )
    others = [f"parallelism.{it}_parallel_degree" for it in ("tensor", "context", "pipeline")]
    ranks = reading.processes
    for name in filter(reading.has, others):
        ranks = max(ranks // reading.positive(name), 1)
    return _local(reading) * (replicas * shards if shards > 0 else ranks)


def _local(reading: Reading) -> int:
    names = ("training.local_batch_size", "training.batch_size")
    return next((reading.positive(name) for name in names if reading.has(name)), 8)


def _batch(reading: Reading, name: str) -> Values:
    reading.number(name)
    return {
        "schedule.global_batch_size": _samples(reading),
        "parallel.micro_batch_size": _local(reading),
    }


def _dropout(reading: Reading, name: str) -> Values:
    """Return the rate; since ``local_batch_size`` replaced ``batch_size``, each encoder has its own draw."""
    rate = reading.number(name)
    if rate and reading.has("training.local_batch_size"):
        text = "there each encoder's prompt is dropped by itself; here both are, at the same rate"
        raise NoCounterpartError(f"{text} squared: flow.prompt_dropout")
    return {"flow.prompt_dropout": rate}


def _decay(reading: Reading, name: str) -> Values:
    kind = "lr_scheduler.decay_type"
    part = reading.number("lr_scheduler.decay_ratio", 1.0)
    if part == 0:
        return {"schedule.decay": "constant"}
    why = "the learning rate decays linearly or as a cosine"
    known = {"linear": "linear", "cosine": "cosine"}
    decay = reading.among(kind, known, why) if reading.has(kind) else "linear"
    reading.notes[name] = "begins a step later there"
    return {"schedule.decay": decay, "schedule.decay_fraction": part}


def _lowest(reading: Reading, name: str) -> Values:
    rate = reading.number("optimizer.lr", 8e-4)
    return {"schedule.min_learning_rate": reading.number(name) * rate}


def _warmup(reading: Reading, name: str) -> Values:
    steps = reading.whole("training.steps", 10**9)
    return {"schedule.warmup_steps": min(reading.whole(name), steps)}


def _is_validated(reading: Reading) -> bool:
    return any(map(reading.is_on, ("validation.enable", "validation.enabled")))


def _data_set(field: str) -> Convert:
    """Return the conversion of a data set, by its name or folder, to ``field``."""

    def convert(reading: Reading, name: str) -> Values:
        section = name.partition(".")[0]
        known, path = f"{section}.dataset", f"{section}.dataset_path"
        word = str(reading.value(known) or "")
        if section == "validation" and not _is_validated(reading):
            return {}
        if field == "data.validation" and not (word or reading.value(path)):
            return {field: "none"}
        if word and word not in _ENCODED | _IMAGES:
            raise reading.wrong(known, "must be a data set of FLUX.1's")
        folder = reading.value(path) or word
        source: Values = {"data.source": "encoded" if word in _ENCODED else "images"}
        return {
            field: str(folder).rstrip("/*"),
            **(source if field == "data.train" and word else {}),
        }

    return convert


def _guidance(reading: Reading, name: str) -> Values:
    section = name.partition(".")[0]
    words = ("classifier", "classifer")
    is_on = any(reading.is_on(f"{section}.enable_{word}_free_guidance") for word in words)
    return {"sampling.cfg_scale": reading.number(name) if is_on else 1.0}


def _evaluated(reading: Reading, name: str) -> Values:
    if not is_of_mlperf(reading.given):
        raise NoCounterpartError("a picture of a training prompt there: sampling.every_steps")
    return {"evaluation.every_samples": reading.whole(name)}


def _validated(reading: Reading, name: str) -> Values:
    if not _is_validated(reading):
        return reading.noted(name, "only with validation.enable")
    steps = reading.positive(name)
    pictures = int(reading.number("validation.save_img_count", 1))
    shown: dict[str, object] = {"sampling.every_steps": steps if pictures else 0}
    shown |= {"sampling.num_prompts": min(pictures, 64)} if pictures > 0 else {}
    return {"evaluation.every_samples": steps * _samples(reading), **shown}


def _validation(why: str, off: object) -> Convert:
    """Return the conversion of an option of evaluations that has no counterpart, but for ``off``."""

    def convert(reading: Reading, name: str) -> Values:
        if _is_validated(reading) and reading.value(name) != off:
            raise NoCounterpartError(why)
        return reading.noted(name, "no evaluation, or the same one")

    return convert


def _interval(reading: Reading, name: str) -> Values:
    if reading.is_on("checkpoint.enable") or reading.is_on("checkpoint.enable_checkpoint"):
        return {"checkpoint.every_steps": reading.positive(name)}
    reading.notes[name] = "checkpoints are off there; here there is one at the end"
    return {"checkpoint.every_steps": 0}


def _initial(reading: Reading, name: str) -> Values:
    if not reading.is_on("checkpoint.initial_load_in_hf"):
        raise NoCounterpartError("is a checkpoint of torchtitan: initial_weights is safetensors")
    return {"initial_weights": reading.text(name)}


_USUAL = ("", "None", "google/t5-v1_1-xxl", "openai/clip-vit-large-patch14")


def _encoder(field: str) -> Convert:
    """Return the conversion of an encoder's place to ``field``; FLUX.1's own ones have theirs here."""

    def convert(reading: Reading, name: str) -> Values:
        path = str(reading.value(name))
        is_usual = path in _USUAL or path.startswith(("torchtitan/", "assets/hf/"))
        reading.notes[name] = "below --models" + "; fluxtrain fetch gets it" * is_usual
        return {} if is_usual else {field: path}

    return convert


def _flavor(reading: Reading, name: str) -> Values:
    if (word := reading.text(name)) not in _FLAVORS:
        raise reading.wrong(
            name, "must be a model of FLUX.1's: flux-dev, flux-schnell or flux-debug"
        )
    if word == "flux-debug" and reading.has("training.local_batch_size"):
        return _DEBUG
    return _BLOCKS if word == "flux-debug" else {}


def _wandb(reading: Reading, name: str) -> Values:
    return {"logging.wandb.project": "torchtitan"} if reading.flag(name) else {}


def _base(reading: Reading) -> Values:
    if is_of_mlperf(reading.given):
        is_encoded = str(reading.value("training.dataset") or "cc12m_preprocessed") in _ENCODED
        name = "mlperf-schnell" if is_encoded else "mlperf-schnell-raw"
        return {"preset": name, "logging.mlperf.division": "auto"}
    rate = next((reading.number(it) for it in _DROPOUTS if reading.has(it)), 0.0)
    return {
        "preset": "mlperf-schnell-raw",
        "logging.mlperf.division": "open",
        "data.validation": "none",
        "flow.prompt_dropout": rate**2,
        "flow.reference_rounding": False,
        "evaluation.every_samples": 0,
        "evaluation.target_loss": _NEVER,
        "schedule.global_batch_size": _samples(reading),
        "parallel.micro_batch_size": _local(reading),
        "sampling.time_shift": "dev",
    }


_NEVER = 1e-6
"""Evaluation loss that no run reaches, instead of the preset's target."""
_DROPOUTS = (
    "training.classifier_free_guidance_prob",
    "training.classifer_free_guidance_prob",
)
_AS_THEY_ARE: Mapping[str, tuple[str, Callable[[Reading, str], object], object]] = {
    "training.max_norm": ("optim.max_grad_norm", Reading.number, 1.0),
    "optimizer.lr": ("optim.learning_rate", Reading.number, 8e-4),
    "optimizer.beta1": ("optim.beta1", Reading.number, 0.9),
    "optimizer.beta2": ("optim.beta2", Reading.number, 0.95),
    "optimizer.eps": ("optim.epsilon", Reading.number, 1e-8),
    "optimizer.weight_decay": ("optim.weight_decay", Reading.number, 0.1),
    "training.steps": ("schedule.steps", Reading.positive, 10_000),
    "training.seed": ("seed", Reading.whole, None),
    "debug.seed": ("seed", Reading.whole, None),
    "training.compile": ("parallel.compile", Reading.flag, None),
    "compile.enable": ("parallel.compile", Reading.flag, None),
    "training.dtype": ("precision.weights", Reading.text, "float32"),
    "training.mixed_precision_reduce": ("precision.reduce", Reading.text, "float32"),
    "encoder.max_t5_encoding_len": ("data.text_length", Reading.positive, 256),
    "encoder.context_in_dim": ("model.context_in_dim", Reading.positive, None),
    "encoder.autoencoder_shift": ("encoders.latent_shift", Reading.number, None),
    "encoder.autoencoder_scale": ("encoders.latent_scale", Reading.number, None),
    "encoder.empty_encodings_path": ("data.empty_encodings", Reading.text, None),
    "eval.batch_size": ("evaluation.batch_size", Reading.positive, None),
    "eval.target_eval_loss": ("evaluation.target_loss", Reading.number, None),
    "eval.denoising_steps": ("sampling.num_steps", Reading.positive, None),
    "validation.local_batch_size": ("evaluation.batch_size", Reading.positive, None),
    "validation.denoising_steps": ("sampling.num_steps", Reading.positive, None),
    "metrics.log_freq": ("logging.every_steps", Reading.positive, 10),
    "metrics.enable_tensorboard": ("logging.tensorboard", Reading.flag, None),
    "parallelism.data_parallel_replicate_degree": ("parallel.dp_replicate", Reading.positive, 1),
}
"""Options that are a field's value, with the default there."""

_OPTIONS: Mapping[str, Option] = {
    "model.name": fields([], common.flux, "llama3", "must be flux"),
    "model.flavor": fields([*_DEBUG], _flavor, note="dev and schnell: from scratch, without guidance"),
    **{name: field_option(path, read, default) for name, (path, read, default) in _AS_THEY_ARE.items()},
    **each("training.batch_size training.local_batch_size training.global_batch_size", fields(
        ["schedule.global_batch_size", "parallel.micro_batch_size"], _batch,
        note="local_batch_size is of a GPU: --gpus of them, unless all degrees are given; 8 there")),
    **each(" ".join(_DROPOUTS), fields(["flow.prompt_dropout"], _dropout)),
    "training.img_size": fields(
        ["data.image_size"], lambda it, name: common.square(it, name, it.value(name)), 256),
    **each("training.dataset training.dataset_path", fields(
        ["data.train", "data.source"], _data_set("data.train"), note="fluxtrain prepare cc12m")),
    "training.mixed_precision_param": fields(["precision.compute"], common.compute_dtype, "bfloat16"),
    "optimizer.name": field_option("optim.name", lambda it, name: it.among(
        name, {"adamw": "adamw"}, "its decay is not decoupled"), "AdamW"),
    "lr_scheduler.warmup_steps": fields(["schedule.warmup_steps"], _warmup, 200),
    "lr_scheduler.decay_ratio": fields(["schedule.decay", "schedule.decay_fraction"], _decay),
    "lr_scheduler.decay_type": fields(
        ["schedule.decay", "schedule.decay_fraction"], _decay, "linear", "constant with decay_ratio=0"),
    **each("lr_scheduler.min_lr_factor lr_scheduler.lr_min",
           fields(["schedule.min_learning_rate"], _lowest, note="times optimizer.lr")),
    "activation_checkpoint.mode": field_option(
        "parallel.activation_checkpointing", lambda it, name: float(it.word(name) != "none"),
        "selective", "all blocks, but with none"),
    "encoder.t5_encoder": fields(["encoders.t5"], _encoder("encoders.t5")),
    "encoder.clip_encoder": fields(["encoders.clip"], _encoder("encoders.clip")),
    "encoder.autoencoder_path": fields(["encoders.autoencoder"], _encoder("encoders.autoencoder")),
    **each("eval.dataset eval.dataset_path validation.dataset validation.dataset_path", fields(
        ["data.validation"], _data_set("data.validation"), note="with validation.enable; none: none")),
    "eval.eval_freq": fields(["evaluation.every_samples"], _evaluated, note="of MLPerf's reference"),
    **each("eval.classifier_free_guidance_scale eval.classifer_free_guidance_scale "
           "validation.classifier_free_guidance_scale",
           fields(["sampling.cfg_scale"], _guidance, note="1 unless it is enabled")),
    "validation.freq": fields(
        ["evaluation.every_samples", "sampling.every_steps", "sampling.num_prompts"], _validated),
    "validation.steps": fields(
        [], _validation("an evaluation is of all of data.validation", -1), note="-1 is as here"),
    "validation.all_timesteps": fields(
        [], _validation("a sample is evaluated at one of eight timesteps", False), note="false is as here"),
    "checkpoint.interval": fields(["checkpoint.every_steps"], _interval, 500),
    "checkpoint.keep_latest_k": fields(["checkpoint.keep"], common.kept_checkpoints, 10, "0: 10000"),
    "checkpoint.async_mode": field_option(
        "checkpoint.asynchronous", lambda it, name: it.word(name) != "disabled", "disabled"),
    "checkpoint.initial_load_path": fields(["initial_weights"], _initial, note="with initial_load_in_hf"),
    **each("eval.enable_classifier_free_guidance eval.enable_classifer_free_guidance "
           "validation.enable_classifier_free_guidance validation.enable validation.enabled "
           "validation.save_img_count checkpoint.enable checkpoint.enable_checkpoint "
           "checkpoint.initial_load_in_hf checkpoint.initial_load_model_only compile.components "
           "compile.backend activation_checkpoint.selective_ac_option profiling.profile_freq "
           "profiling.save_traces_folder profiling.save_memory_snapshot_folder",
           automatic("is part of another option")),
    **each("checkpoint.last_save_model_only checkpoint.last_save_model_weights_only "
           "checkpoint.last_save_in_hf checkpoint.model_weights_only checkpoint.export_dtype",
           automatic("a checkpoint has all; fluxtrain export writes its weights")),
    "checkpoint.load_step": missing("the newest checkpoint of --output is loaded", -1),
    **each("checkpoint.exclude_from_loading checkpoint.enable_first_step_checkpoint "
           "checkpoint.create_seed_checkpoint checkpoint.load_only",
           missing("checkpoints are whole, and saved each checkpoint.every_steps", "")),
    "metrics.enable_wandb": fields(["logging.wandb.project"], _wandb, note="torchtitan"),
    "parallelism.data_parallel_shard_degree": automatic("the ranks of a replica"),
    "parallelism.fsdp_reshard_after_forward": ignored("FLUX.1's blocks always free their weights there"),
    **each("parallelism.tensor_parallel_degree parallelism.context_parallel_degree "
           "parallelism.pipeline_parallel_degree",
           missing("weights are sharded, nothing else: parallel.dp_replicate", 1)),
    **each("parallelism.enable_async_tensor_parallel parallelism.enable_compiled_autograd "
           "parallelism.fsdp_overlap_comm parallelism.fsdp_prefetch_params optimizer.implementation "
           "optimizer.fused parallelism.context_parallel_rotate_method comm.init_timeout_seconds "
           "comm.train_timeout_seconds comm.trace_buf_size training.gc_freq",
           automatic("decides the speed alone")),
    "training.enable_cpu_offload": missing("parallel.offload_blocks is of frozen weights"),
    **each("optimizer.early_step_in_backward training.deterministic training.test_mode "
           "profiling.enable_profiling profiling.enable_memory_snapshot", missing("a run has no such mode")),
    "model.converters": missing("precision.fp8 computes the blocks' layers in fp8"),
    **each("model.print_after_conversion model.tokenizer_path model.hf_assets_path training.seq_len",
           ignored("FLUX.1 does not use it there")),
    **each("inference.save_img_folder inference.prompts_path inference.local_batch_size inference.img_size",
           set_outside("fluxtrain sample")),
    **each("job.dump_folder checkpoint.folder eval.save_img_folder validation.save_img_folder "
           "metrics.save_tb_folder", set_outside("fluxtrain run FILE --output DIR, with folders for each")),
    **each("job.description job.print_args job.print_config job.custom_config_module "
           "metrics.save_for_all_ranks job.use_for_integration_test metrics.disable_color_printing "
           "experimental.custom_args_module experimental.custom_import",
           automatic("config.json of --output has all values")),
    "num_processes": fields([], common.launched, note="NGPU or --nproc_per_node; must be --gpus"),
}  # fmt: skip

TORCHTITAN = Trainer("torchtitan", _OPTIONS, _base)
MLPERF = Trainer(
    "MLPerf's reference",
    {name: replace(row, default=None) for name, row in _OPTIONS.items()},
    _base,
)
"""Its preset has the values that are not given."""
