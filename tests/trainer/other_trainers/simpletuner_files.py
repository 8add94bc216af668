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
