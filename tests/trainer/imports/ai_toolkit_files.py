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
PAGE = """
job: extension
config:
  name: enamel pins
  process:
    - type: diffusion_trainer
      training_folder: /app/output
      sqlite_db_path: ./jobs.db
      device: cuda
      trigger_word: enpn
      performance_log_every: 10
      network:
        type: lokr
        linear: 16
        linear_alpha: 8
        conv: 16
        conv_alpha: 16
        lokr_full_rank: false
        lokr_factor: 8
        dropout: 0.1
        network_kwargs: {ignore_if_contains: []}
      save: {dtype: bf16, save_every: 250, max_step_saves_to_keep: 4, save_format: diffusers}
      datasets:
        - folder_path: /data/others
          is_reg: true
          resolution: [512]
        - folder_path: /data/pins
          mask_path: /data/pins-masks
          mask_min_value: 0.1
          default_caption: ""
          caption_ext: txt
          caption_dropout_rate: 0.05
          shuffle_tokens: true
          token_dropout_rate: 0.2
          keep_tokens: 2
          cache_latents_to_disk: true
          is_reg: false
          network_weight: 1
          resolution: [512, 768, 1024]
          controls: []
          shrink_video_to_frames: true
          num_frames: 1
          do_i2v: true
          flip_x: true
          flip_y: false
          random_crop: true
          num_repeats: 4
          control_path_1: null
      train:
        batch_size: 2
        steps: 2000
        gradient_accumulation: 1
        train_unet: true
        train_text_encoder: false
        gradient_checkpointing: true
        noise_scheduler: flowmatch
        optimizer: adamw8bit
        timestep_type: flux_shift
        content_or_style: balanced
        optimizer_params: {weight_decay: 1e-4}
        unload_text_encoder: false
        cache_text_embeddings: false
        lr: 1e-4
        reg_weight: 0.5
        ema_config: {use_ema: false, ema_decay: 0.99}
        skip_first_sample: false
        force_first_sample: true
        disable_sampling: false
        dtype: bf16
        diff_output_preservation: false
        diff_output_preservation_multiplier: 1
        diff_output_preservation_class: person
      model:
        name_or_path: black-forest-labs/FLUX.1-dev
        quantize: true
        qtype: qfloat8
        quantize_te: true
        qtype_te: qfloat8
        arch: flux
        low_vram: false
      sample:
        sampler: flowmatch
        sample_every: 250
        width: 1024
        height: 768
        samples:
          - {prompt: "[trigger], a red heart"}
          - {prompt: "a green leaf --m 0.5", seed: 7, width: 512}
        neg: ""
        seed: 42
        walk_seed: true
        guidance_scale: 4
        sample_steps: 25
        num_frames: 1
        fps: 1
meta: {name: "[name]", version: "1.0"}
"""
"""As the trainer's web page writes it: with every setting, also those that are off."""
