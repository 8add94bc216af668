"""Names and numbers of two public guides: MLPerf's text_to_image reference, and its port to AMD GPUs.

Each has its counterparts here: a field, a field with the preset's value, an option of a command, a make
target, a variable, a file, or none. ``docs/coming-from.md`` has them in one row.
"""

from __future__ import annotations

NONE = "none"

REFERENCE = {
    "docker build -t -f": "make setup",
    "docker run -it --rm -v": "make setup",
    "--gpus all": "spec gpusPerNode",
    "--ipc=host": "spec resources.sharedMemory",
    "--network=host": NONE,
    "--ulimit memlock=-1": NONE,
    "--ulimit stack=67108864": NONE,
    "mkdir": NONE,
    "rm -r": NONE,
    "requirements.txt": "make setup",
    "pip install -r requirements-mlperf.txt": "make setup",
    "mlc-r2-downloader.sh URI": "option prepare download --manifest",
    "flux-1-cc12m-preprocessed.uri": "option prepare download --manifest",
    "flux-1-coco-preprocessed.uri": "option prepare download --manifest",
    "flux-1-empty-encodings.uri": "option prepare download --manifest",
    "flux-1-cc12m-disk.uri": "option prepare download --manifest",
    "flux-1-coco.uri": "option prepare download --manifest",
    "val2014_30k.tsv": "option prepare coco --output",
    "huggingface-cli download --repo-type dataset pixparse/cc12m-wds --local-dir": (
        "option prepare cc12m --input"
    ),
    "HF_TRANSFER=1": NONE,
    "clean_cc12m.py": "option prepare cc12m --problematic",
    "clean_cc12m.py --input_dir --output_dir --filter_file --num_workers --batch_size": (
        "option prepare cc12m --input; option prepare cc12m --output; "
        "option prepare cc12m --problematic; option prepare cc12m --workers; none"
    ),
    "find_problematic_indices.py": NONE,
    "coco-2014-validation-download.sh": "option prepare coco --archives",
    "DOWNLOAD_PATH": "option prepare coco --output",
    "coco_to_webdataset.py --input-images-dir --input-captions-file --output-dir --num-samples": (
        "option prepare coco --images; option prepare coco --captions; "
        "option prepare coco --output; option prepare coco --samples"
    ),
    "coco_to_webdataset.py --width --height --samples-per-shard --output-tsv-file": (
        "field data.image_size; none"
    ),
    "download_encoders.py --local_dir --hf_token": (
        "option prepare encoders --from; option prepare encoders --output; variable HF_TOKEN"
    ),
    "run_preprocessing.sh": "file examples/mlperf-from-raw/3-preprocess.yaml",
    "NGPU=8 run_train.sh": "option run --processes",
    "run_train.sh --help": "option run --help-fields",
    "sbatch -N 4 -t TIME run.sub": "file examples/slurm/train.sbatch",
    "flux_schnell_mlperf.toml": "preset mlperf-schnell-raw",
    "flux_schnell_mlperf_preprocessed.toml": "preset mlperf-schnell",
    "--training.dataset": "field data.source; field data.train",
    "--training.dataset_path": "field data.train",
    "--training.batch_size": "field schedule.global_batch_size; field parallel.micro_batch_size",
    "--training.seed": "field seed",
    "--training.steps": "field schedule.steps",
    "--training.compile": "field parallel.compile",
    "--training.mixed_precision_param": "field precision.compute",
    "--eval.dataset": "field data.validation",
    "--eval.dataset_path": "field data.validation",
    "--preprocessing.output_dataset_path": "field preprocess.train",
    "--encoder.autoencoder_path": "field encoders.autoencoder",
    "--encoder.t5_encoder": "field encoders.t5",
    "--encoder.clip_encoder": "field encoders.clip",
    "--optimizer.lr": "field optim.learning_rate",
    "--parallelism.data_parallel_replicate_degree": "field parallel.dp_replicate",
    "--parallelism.data_parallel_shard_degree": "field parallel.dp_replicate",
    "--checkpoint.enable_checkpoint": "field checkpoint.every_steps",
    "--checkpoint.interval": "field checkpoint.every_steps",
    "CONFIG": NONE,
    "CONFIG_FILE": NONE,
    "CONT": NONE,
    "NGPU": "option run --processes",
    "ENABLE_CHECKPOINTING": "field checkpoint.every_steps",
    "DATAROOT": "option run --data",
    "MODELROOT": "option run --models",
    "LOGDIR": "option run --output",
    "SEED": NONE,
    "19": "value model.depth=19",
    "38": "value model.depth_single_blocks=38",
    "24": "value model.num_heads=24",
    "3072": "value model.hidden_size=3072",
    "4.0": "value model.mlp_ratio=4.0",
    "64": "value model.in_channels=64",
    "~11.9B": NONE,
    "~123M": NONE,
    "~11B": NONE,
    "~84M": NONE,
    "256": "value data.text_length=256",
    "4096": "value model.context_in_dim=4096",
    "768": "value model.vec_in_dim=768",
    "77": NONE,
    "256x256": "value data.image_size=256",
    "32": "value data.latent_size=32",
    "16": NONE,
    "1,099,776": "option prepare cc12m --samples=1099776",
    "~10%": "option prepare cc12m --samples",
    "29,696": "option prepare coco --samples=29696",
    "40,504": NONE,
    "202,654": NONE,
    "0.586": "value evaluation.target_loss=0.586",
    "262,144": "value evaluation.every_samples=262144",
    "7/8": NONE,
    "8.0": NONE,
    "MSE": NONE,
    "AdamW": "value optim.name=adamw",
    "Xavier": NONE,
    "bicubic": NONE,
    "8": NONE,
    "BF16": "value precision.compute=bfloat16",
    "~1TB": NONE,
    "~2.5TB": NONE,
    "1234": "value seed=random",
    "1": "value schedule.global_batch_size=512",
    "128": "value preprocess.batch_size=64",
}

PORT = {
    "setup_baremetal.sh": "make setup",
    "source env_baremetal.sh": "make setup",
    "setup_baremetal.sh --download-cc12m": "option prepare download --manifest",
    "--all": "option prepare cc12m --input",
    "setup_baremetal.sh --rocm-version 6.4": "make setup TORCH=rocm6.4",
    "--rocm-version 6.2": NONE,
    "rocm7.1": "make setup TORCH=rocm7.1; variable TORCH_INDEX",
    "--dataroot": "option run --data; variable DATAROOT",
    "--modelroot": "option run --models; variable MODELROOT",
    "--hf-token": "variable HF_TOKEN",
    "setup_baremetal.sh --help": "make help",
    "pip install -e .": "make setup",
    "requirements-flux.txt": "make setup",
    "fsdp_compat.py": NONE,
    "run_baremetal.sub --nodes --gpus-per-node --time": "file examples/slurm/train.sbatch",
    "PYTORCH_CUDA_ALLOC_CONF": NONE,
    "PYTORCH_HIP_ALLOC_CONF": NONE,
    "HIP_LAUNCH_BLOCKING": NONE,
    "HSA_FORCE_FINE_GRAIN_PCIE": NONE,
    "NCCL_*": NONE,
    "CONDA_ENV_NAME": NONE,
    "HF_CACHE": NONE,
}

TORCHTITAN = {
    "ENABLE_TB": "field logging.tensorboard",
    "LOG_RANK": NONE,
}
