"""Two files of SimpleTuner as people write them: a LoRA, and a full fine-tuning with dashes before names."""

LORA = """
{
  "model_family": "flux",
  "model_type": "lora",
  "model_flavour": "dev",
  "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
  "base_model_precision": "int8-quanto",
  "data_backend_config": "config/pins.json",
  "lora_rank": 8,
  "lora_alpha": 4,
  "flux_lora_target": "all+ffs",
  "lora_dropout": 0.05,
  "optimizer": "adamw_bf16",
  "learning_rate": 1e-4,
  "lr_scheduler": "polynomial",
  "lr_warmup_steps": "100",
  "lr_end": 1e-6,
  "max_grad_norm": 1.0,
  "grad_clip_method": "norm",
  "max_train_steps": 3000,
  "num_train_epochs": 0,
  "train_batch_size": 2,
  "gradient_accumulation_steps": 3,
  "gradient_checkpointing": "true",
  "gradient_checkpointing_interval": 2,
  "mixed_precision": "bf16",
  "seed": 42,
  "checkpointing_steps": 250,
  "checkpoints_total_limit": 4,
  "caption_dropout_probability": 0.05,
  "resolution": 1024,
  "resolution_type": "pixel_area",
  "validation_prompt": "a pin on a jacket",
  "validation_step_interval": 500,
  "validation_guidance": 3.0,
  "validation_num_inference_steps": 20,
  "output_dir": "output/pins",
  "report_to": "wandb",
  "tracker_project_name": "pins",
  "snr_gamma": 5,
  "hub_token": "not-to-be-shown",
  "sparkle": true
}
"""
FULL = """
{
  "--model_family": "flux",
  "--model_type": "full",
  "--model_flavour": "schnell",
  "--optimizer": "optimi-lion",
  "--learning_rate": "1e-6",
  "--flow_use_uniform_schedule": true,
  "--flow_schedule_shift": 0,
  "--num_train_epochs": 2,
  "--resolution": 1.0,
  "--resolution_type": "area",
  "--lora_rank": 64,
  "--validation_disable": true,
  "--validation_steps": 10
}
"""
LOKR = """
{
  "model_family": "flux",
  "model_type": "lora",
  "model_flavour": "dev",
  "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
  "base_model_precision": "fp8-torchao",
  "data_backend_config": "config/multidatabackend.json",
  "lora_type": "lycoris",
  "lycoris_config": "config/lycoris_config.json",
  "validation_lycoris_strength": 1.0,
  "lora_rank": 16,
  "optimizer": "bnb-adamw8bit",
  "learning_rate": 4e-4,
  "lr_scheduler": "cosine",
  "lr_warmup_steps": 50,
  "max_grad_norm": 1.0,
  "grad_clip_method": "norm",
  "max_train_steps": 0,
  "num_train_epochs": 20,
  "train_batch_size": 4,
  "aspect_bucket_alignment": 32,
  "masked_loss_probability": 1.0,
  "mixed_precision": "bf16",
  "seed": 42,
  "checkpoint_step_interval": 200,
  "minimum_image_size": 0,
  "resolution": 512,
  "resolution_type": "pixel_area",
  "validation_prompt": "ohwx, a red heart",
  "validation_step_interval": 200,
  "validation_resolution": "1024x1024,1280x768",
  "validation_seed": 7,
  "validation_guidance_real": 4,
  "validation_negative_prompt": "blurry",
  "output_dir": "output/lokr"
}
"""
BACKENDS = """
[
  {
    "id": "toys-512", "type": "local", "dataset_type": "image",
    "instance_data_dir": "datasets/toys", "conditioning_data": ["toy-masks"],
    "crop": true, "crop_aspect": "preserve", "crop_style": "center",
    "resolution": 512, "minimum_image_size": 0, "cache_dir_vae": "cache/512",
    "caption_strategy": "textfile", "prepend_instance_prompt": true, "instance_prompt": "ohwx,",
    "caption_shuffle": {"enable": true, "count": 3, "split_on": "period", "position_start": 1},
    "repeats": 9
  },
  {
    "id": "toys-1024", "type": "local", "dataset_type": "image",
    "instance_data_dir": "datasets/toys", "conditioning_data": ["toy-masks"],
    "crop": true, "crop_aspect": "preserve", "crop_style": "center",
    "resolution": 1024, "minimum_image_size": 768, "cache_dir_vae": "cache/1024",
    "caption_strategy": "textfile", "prepend_instance_prompt": true, "instance_prompt": "ohwx,",
    "caption_shuffle": {"enable": true, "count": 3, "split_on": "period", "position_start": 1},
    "repeats": 9
  },
  {
    "id": "toy-masks", "type": "local", "dataset_type": "conditioning",
    "conditioning_type": "mask", "instance_data_dir": "datasets/toy-masks"
  },
  {"id": "others", "type": "local", "instance_data_dir": "datasets/others", "is_regularisation_data": true},
  {"id": "off", "type": "local", "instance_data_dir": "datasets/off", "disabled": true},
  {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": true, "cache_dir": "cache/t"}
]
"""
LYCORIS = """
{
  "algo": "lokr", "multiplier": 1.0, "linear_dim": 10000, "linear_alpha": 1, "factor": 16,
  "apply_preset": {
    "target_module": ["Attention", "FeedForward"],
    "module_algo_map": {"Attention": {"factor": 16}, "FeedForward": {"factor": 16}}
  }
}
"""
