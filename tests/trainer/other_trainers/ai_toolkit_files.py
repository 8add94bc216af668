"""Two files of ai-toolkit as people write them: a LoRA of dev, and one of schnell with another optimizer."""

DEV = """
job: extension
config:
  name: watercolour_v2
  process:
    - type: sd_trainer
      training_folder: runs
      device: cuda:0
      trigger_word: wtrclr
      network: {type: lora, linear: 32, linear_alpha: 8}
      save: {dtype: bf16, save_every: 200, max_step_saves_to_keep: 3, push_to_hub: false}
      datasets:
        - folder_path: /data/watercolour
          caption_ext: txt
          num_repeats: 3
          default_caption: a picture
          caption_dropout_rate: 0.1
          shuffle_tokens: false
          cache_latents_to_disk: true
          resolution: [768]
      train:
        batch_size: 2
        steps: 1500
        gradient_accumulation_steps: 4
        train_unet: true
        train_text_encoder: false
        gradient_checkpointing: true
        noise_scheduler: flowmatch
        optimizer: adamw8bit
        lr: 2e-4
        optimizer_params: {weight_decay: 1e-3}
        lr_scheduler: constant_with_warmup
        lr_scheduler_params: {num_warmup_steps: 40}
        ema_config: {use_ema: true, ema_decay: 0.99}
        dtype: bf16
      model:
        name_or_path: black-forest-labs/FLUX.1-dev
        is_flux: true
        quantize: true
      sample:
        sampler: flowmatch
        sample_every: 300
        width: 1024
        height: 768
        prompts: [a lighthouse, "a harbour, in fog"]
        neg: ""
        seed: 3
        walk_seed: true
        guidance_scale: 3.5
        sample_steps: 24
meta: {name: "[name]", version: "1.0"}
"""
SCHNELL = """
job: extension
config:
  name: pins
  process:
    - type: sd_trainer
      network: {type: lora, rank: 8}
      train:
        optimizer: automagic
        lr: 1e-3
        timestep_type: linear
        steps: 600
        dtype: bf16
        disable_sampling: true
        made_up: 1
      model: {name_or_path: black-forest-labs/FLUX.1-schnell, arch: flux}
      datasets:
        - {folder_path: a, resolution: [512, 768]}
        - {folder_path: b}
      sample: {sample_every: 100}
"""
