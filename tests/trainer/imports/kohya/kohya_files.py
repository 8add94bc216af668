"""Files of kohya's sd-scripts as people write them: LoRAs, one by another window, and a full fine-tuning."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.imports.files import import_file
from fluxtrain.imports.table import Imported

LORA = """
pretrained_model_name_or_path = "/models/flux1-dev.safetensors"
clip_l = "/models/clip_l.safetensors"
t5xxl = "/models/t5xxl_fp16.safetensors"
ae = "/models/ae.safetensors"

[network]
network_module = "networks.lora_flux"
network_dim = 16
network_alpha = 8
network_train_unet_only = true
network_args = ["train_double_block_indices=0-9", "img_mod_dim=0", "split_qkv=True", "rank_dropout=0.1"]
network_dropout = 0.2

[optimizer]
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.05", "betas=0.9,0.99"]
learning_rate = 1e-4
unet_lr = 4e-4
lr_scheduler = "cosine"
lr_warmup_steps = 0.05
lr_scheduler_num_cycles = 3
max_grad_norm = 0.0

[training]
train_batch_size = 4
gradient_accumulation_steps = 2
max_train_epochs = 20
seed = 7
mixed_precision = "bf16"
fp8_base = true
gradient_checkpointing = true
timestep_sampling = "shift"
discrete_flow_shift = 3.1582
sigmoid_scale = 1.1
model_prediction_type = "raw"
guidance_scale = 1.0
noise_offset = 0.1
min_snr_gamma = 5
t5xxl_max_token_length = 512
caption_dropout_rate = 0.05
resolution = "768,768"

[saving]
output_dir = "out"
output_name = "my cat"
save_precision = "fp16"
save_every_n_epochs = 2
sample_every_n_steps = 250
sample_prompts = "prompts.txt"
log_with = "wandb"
log_tracker_name = "cats"
wandb_api_key = "not-to-be-shown"
sdpa = true
flux_magic = 3
"""
FINE_TUNING = """
pretrained_model_name_or_path = "flux1-schnell.safetensors"
train_data_dir = "pictures"
dataset_repeats = 5
caption_prefix = "pin, "
caption_extension = ".txt"
optimizer_type = "AdamW"
learning_rate = 5e-6
lr_scheduler = "constant_with_warmup"
lr_warmup_steps = 50
max_train_steps = 3000
train_batch_size = 2
timestep_sampling = "flux_shift"
model_prediction_type = "raw"
mixed_precision = "bf16"
full_bf16 = true
blockwise_fused_optimizers = true
blocks_to_swap = 8
save_every_n_steps = 500
"""
EASY_TRAINING = """
[[subsets]]
name = "subset 1"
image_dir = "pictures/cat"
num_repeats = 4
caption_extension = ".txt"
shuffle_caption = true
keep_tokens = 1

[train_mode]
train_mode = "lora"

[general_args.args]
pretrained_model_name_or_path = "flux1-dev.safetensors"
mixed_precision = "bf16"
seed = 0
max_train_steps = 750
gradient_checkpointing = true
lowram = true
no_half_vae = true

[general_args.dataset_args]
resolution = 768
batch_size = 2

[network_args.args]
network_dim = 8
network_alpha = 4.0
min_timestep = 0
max_timestep = 1000

[network_args.args.network_args]
train_blocks = "single"

[optimizer_args.args]
optimizer_type = "Prodigy"
lr_scheduler = "cosine"
learning_rate = 1.0
max_grad_norm = 0.0
loss_type = "l2"
min_snr_gamma = 5
warmup_ratio = 0.05

[optimizer_args.args.optimizer_args]
d_coef = "2.0"
weight_decay = 0.01
betas = "0.9,0.99"
use_bias_correction = "true"

[saving_args.args]
easy_name = "cat"
output_dir = "out/${replace}"
output_name = "${replace}_v1"
save_precision = "fp16"
save_every_n_steps = 250
save_toml = true

[bucket_args.dataset_args]
enable_bucket = true
min_bucket_reso = 256
max_bucket_reso = 1024
bucket_reso_steps = 64

[noise_args]

[flux_args.args]
ae = "ae.safetensors"
clip_l = "clip_l.safetensors"
t5xxl = "t5xxl_fp16.safetensors"
t5xxl_max_token_length = 512
discrete_flow_shift = 3.1
timestep_sampling = "shift"
sigmoid_scale = 1.0
weighting_scheme = "none"
guidance_scale = 1.0
model_prediction_type = "raw"

[extra_args.args]
cache_latents = "True"
"""


def imported(tmp_path: Path, text: str, processes: int = 1, samples: int | None = None) -> Imported:
    """Return what is imported of ``text``, with an option that says that it is for FLUX.1."""
    file = tmp_path / "kohya.toml"
    file.write_text(text if "flux" in text else f'model_type = "flux"\n{text}')
    return import_file(file, {}, processes, samples)
