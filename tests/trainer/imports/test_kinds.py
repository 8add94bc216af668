"""Whose a file is, and which kind of training: told by its own options, and refused by name otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.imports.files import import_file, read_options
from fluxtrain.imports.kinds import of_model
from fluxtrain.imports.table import Disposition

LORA = 'network_module = "networks.lora_flux"\nnetwork_train_unet_only = true\n'
TUNER = '{"model_family": "flux", "model_type": "lora", "max_train_steps": 9'
JOB = "job: extension\nconfig:\n  name: a\n  process:\n  - type: sd_trainer\n"
FLUX = JOB + "    model: {is_flux: true}\n    network: {type: lora, linear: 8}\n"
SETS = '[{"id": "a", "type": "local", "instance_data_dir": "p"'

# (name of the file, its text, part of what is said)
FOREIGN: list[tuple[str, str, str]] = [
    ("a.json", '{"training_method": "LORA", "model_type": "FLUX_FILL_DEV_1", "learning_rate": 1e-4}',
     "asks for Fill"),
    ("a.json", '{"training_method": "LORA", "model_type": "QWEN"}', "asks for another model than FLUX.1"),
    ("a.json", '{"training_method": "LORA", "learning_rate": 1e-4}', "model_type: got 'STABLE_DIFFUSION_15'"),
    ("a.json", '{"training_method": "EMBEDDING", "model_type": "FLUX_DEV_1"}', "asks for textual inversion"),
    ("a.json", '{"training_method": "LORA", "model_type": "FLUX_DEV_1", "peft_type": "OFT_2"}',
     "asks for adapters of another kind"),
    ("a.json", '[{"path": "p", "include_subdirectories": true, "text": {"prompt_source": "x"}}]',
     "OneTrainer's list"),
    ("a.json", '{"LoRA_type": "Flux1", "network_dim": 8}', "a GUI for kohya's"),
    ("a.json", '{"max_resolution": "512,512", "lr_warmup": 10, "train_data_dir": "p"}', "a GUI for kohya's"),
    ("config.toml", '[accelerate_launch]\nnum_processes = 1\n[model]\ntrain_data_dir = "p"',
     "a GUI for kohya's"),
    ("a.toml", "[[subsets]]\n[network_args.args]\nnetwork_dim = 8\n[saving_args.args]\n",
     "is of LoRA_Easy_Training_Scripts, for another model than FLUX.1"),
    ("a.toml", "micro_batch_size_per_gpu = 1\n[model]\ntype = 'flux'\n[adapter]\nrank = 8",
     "diffusion-pipe's"),
    ("a.toml", "resolutions = [512]\n[[directory]]\npath = 'p'", "diffusion-pipe's"),
    ("a.toml", "[general]\nbatch_size = 1\n[[datasets]]\nimage_directory = 'p'", "musubi-tuner's"),
    ("a.toml", "dit = 'd.safetensors'\nnetwork_module = 'networks.lora_wan'", "musubi-tuner's"),
    ("a.toml", "[general]\nenable_bucket = true\n[[datasets]]\nresolution = 512", "kohya's data set config"),
    ("d.json", '{"datasets": [{"subsets": [{"image_dir": "p"}]}]}', "kohya's data set config"),
    ("a.yaml", "base_model: m\nadapter: lora\nlora_r: 8\ndatasets: [{path: d, type: t}]", "axolotl's"),
    ("a.yaml", "model_name_or_path: m\nstage: dpo\nlora_rank: 8", "LLaMA-Factory's"),
    ("a.yaml", "data_config: {img_dir: p, img_size: 512}\nreport_to: wandb\nsample_prompts: [a]", "x-flux's"),
    ("a.yaml", "task: dreambooth\nbase_model: b/FLUX.1-dev\nproject_name: x", "AutoTrain's"),
    ("a.json", '{"input_images": "a.zip", "lora_rank": 16, "steps": 1000}', "hosted trainer"),
    ("Cargo.toml", "[package]\nname = 'x'\nversion = '1'\nedition = '2021'\n[dependencies]\nseed = '1'",
     "Cargo.toml"),
    ("pyproject.toml", "[project]\nname = 'x'\nversion = '1'", "pyproject.toml"),
    ("renamed.toml", "[build-system]\nrequires = []\n[tool.ruff]\nline-length = 9", "pyproject.toml"),
    ("package.json", '{"name": "x", "version": "1", "scripts": {"a": "b"}}', "package.json"),
    ("a.json", '{"_class_name": "FluxTransformer2DModel", "num_layers": 19}', "a model's configuration"),
    ("a.json", '{"peft_type": "LORA", "r": 8}', "fluxtrain adapter info"),
    ("a.json", '{"3": {"class_type": "KSampler", "inputs": {}}}', "ComfyUI"),
    ("a.yaml", "compute_environment: LOCAL_MACHINE\nmixed_precision: bf16", "accelerate's"),
    ("a.json", '{"zero_optimization": {"stage": 2}}', "DeepSpeed's"),
    ("a.json", SETS + "}]", "SimpleTuner's list of backends"),
    ("a.json", '{"algo": "lokr", "linear_dim": 10000}', "LyCORIS' part"),
    ("a.yaml", "apiVersion: fluxtrain.dev/v1alpha1\nkind: FluxTraining", "a FluxTraining already"),
    ("a.yaml", "preset: dev-lora\nschedule: {steps: 5}", "spec.run of a FluxTraining"),
    ("a.toml", "[training]\nsteps = 5\n[metrics]\nlog_freq = 1", "model.name: got 'llama3'; must be flux"),
    ("t.sh", "torchrun -m torchtitan.experiments.flux.train --training.local_batch_size 4",
     "names no file (CONFIG_FILE)"),
    ("t.sh", "CONFIG_FILE=a/flux.toml NGPU=8 ./run_train.sh --training.steps=30", "names a/flux.toml, which"),
    ("t.sh", "./run_train.sh --module flux --config flux_dev", "configurations in Python"),
    ("t.sh", "./run_train.sh --job.config_file $FILE", "write what they stand for"),
    ("t.sh", "./run_train.sh --training.steps 3\n./run_train.sh --training.steps 9", "has 2 commands"),
    ("t.sh", "./run_preprocessing.sh --preprocessing.output_dataset_path=a", "torchtitan's preprocessing"),
    ("a.yaml", "train_args: {train_batch_size: [1, 10]}\naccelerate_config: {a: [no]}", "FluxBenchmark's"),
    ("a.yaml", "defaults: [{launcher: defaults}, {train_args: flux-dev}, _self_]", "FluxBenchmark's"),
    ("a.yaml", "cli_args: {num_iterations: [100]}\ndynamo_config.dynamo_backend: ['no']\n"
     "accelerate_config: {a: [b]}", "FluxBenchmark's"),
    ("t.sh", "python launcher.py --config-name=flux_benchmark", "a command of FluxBenchmark"),
    ("a.yaml", "step_scheduler: {global_batch_size: 8}\nflow_matching: {timestep_sampling: uniform}\n"
     "optim: {learning_rate: 1.0e-4}", "NeMo AutoModel's"),
    ("a.yaml", "network_module: networks.lora_flux\nnetwork_dim: 4", "it has no option of theirs alone"),
    ("a.json", '{"LoRA_type": "Standard", "max_resolution": "512,512", "sdxl": true}',
     "flux1_checkbox is not set"),
    ("a.toml", "pretrained_model_name_or_path = 'm/model.safetensors'\ntrain_data_dir = 'p'",
     "does not say that it is for FLUX.1"),
    ("a.toml", "network_module = 'lycoris.kohya'\nnetwork_args = ['algo=lokr']\nv2 = false",
     "does not say that it is for FLUX.1"),
    # nobody's: no option that one trainer alone has
    ("a.toml", "learning_rate = 1e-4\nmax_train_steps = 9", "it has no option of theirs alone"),
    ("a.toml", "", "it has no option of theirs alone"),
    ("a.toml", '[server]\nhost = "x"\nseed = 1', "it has no option of theirs alone"),
    ("a.json", '{"lora_rank": 8, "optimizer": "adamw", "report_to": "wandb"}',
     "it has no option of theirs alone"),
    ("a.yaml", "learning_rate: 1.0e-4\nnum_train_epochs: 3", "it has no option of theirs alone"),
    ("a.toml", LORA + "lora_format = 'comfyui'",
     "has options of kohya's sd-scripts, such as network_module, and of"),
    # commands and variables
    ("t.sh", "accelerate launch train_dreambooth_lora_flux_advanced.py", "a command of diffusers' examples"),
    ("t.sh", "accelerate launch train_dreambooth_lora_flux2.py --rank 4", "a command of diffusers' examples"),
    ("t.sh", "accelerate launch train_dreambooth_flux.py --with_prior_preservation",
     "asks for DreamBooth's regularisation pictures"),
    ("t.sh", "python train_controlnet_flux.py", "a command of a ControlNet"),
    ("t.sh", "accelerate launch train_dreambooth_lora_flux_kontext.py",
     "a command of Kontext, which edits pictures; for pairs, fluxtrain init PAIRS --base=kontext"),
    ("t.sh", "python src/musubi_tuner/flux_kontext_train_network.py --dit d", "a command of Kontext"),
    ("t.bat", "accelerate launch flux_train_control_net.py ^\r\n --ae a", "for a ControlNet"),
    ("t.ps1", "accelerate launch sdxl_train_network.py `\n --network_dim 8", "for another model"),
    ("t.sh", "python train_textual_inversion.py", "textual inversion"),
    ("t.sh", "python run.py config/a.yaml", "import the YAML that the command names"),
    ("t.sh", "accelerate launch train.py --lora_base_model dit --lora_rank 32", "DiffSynth-Studio"),
    ("t.sh", "python train_flux_lora.py --pretrained_dit_path=m", "DiffSynth-Studio"),
    ("t.sh", 'trainer_file="./scripts/dev/flux_train_network.py"\npython "$trainer_file" --sdpa',
     "has the script's name in a variable"),
    ("t.ps1", '$file = "./flux_train_network.py"\npython $file @ext', "has the script's name in a variable"),
    ("t.ps1", "accelerate launch flux_train.py @ext --sdpa", "command: got '@ext'; must not have variables"),
    ("t.sh", "python flux_train.py ${EXTRA} --sdpa", "command: got '${EXTRA}'; must not have variables"),
    ("t.sh", "accelerate launch flux_train.py --rank 16 --jsonl_for_train a --report_to wandb",
     "is a command of another program of that name, with --rank"),
    ("t.sh", "accelerate launch --num_processes 2 a/train_reflow.py --rank 16", "runs train_reflow.py"),
    ("t.sh", "echo hello", "has no command that trains"),
    ("t.bat", "@REM python flux_train.py ^\r\n@REM --sdpa", "has no command that trains"),
    ("t.sh", "python flux_train_network.py --network_dim $DIM", "must not have variables; add --config_file"),
    ("a.env", "MODEL_FAMILY=flux\nMODEL_TYPE=lora\nMODEL_NAME=$HOME/flux",
     "pretrained_model_name_or_path: got '$HOME/flux'; must not have variables that"),
    ("a.env", 'MODEL_FAMILY=flux\nMODEL_TYPE=lora\nINIT_LORA="$(pwd)/$INIT_LORA"',
     "init_lora: got '$(pwd)/'; must not have variables that"),
    ("a.env", "A=12345678\n" + "A=$A$A\n" * 60, "a.env: has a variable of more than 65536 characters"),
    ("t.sh", "A=12345678\n" + "A=$A$A\n" * 60 + "python train_dreambooth_lora_flux.py --rank $A",
     "t.sh: has a variable of more than 65536 characters"),
    ("t.sh", "python flux_train.py --output_name a-`date +%F`", "output_name: got 'a-`date +%F'; must not"),
    ("t.bat", "python flux_train.py --train_data_dir !DATA!", "train_data_dir: got '!DATA!'; must not"),
    ("t.sh", "MODEL_FAMILY=flux\nMODEL_TYPE=lora\nMODEL_NAME=${BASE:-b/FLUX.1-dev}",
     "pretrained_model_name_or_path: got '${BASE:-b/FLUX.1-dev}'; must not have variables that"),
    ("t.sh", "MODEL_FAMILY=flux\nMODEL_TYPE=lora\nMODEL_NAME=`cat name`", "got '`cat'; must not have"),
    ("a.env", "MODEL_FAMILY=flux\nMODEL_TYPE=lora\nLORA_RANK='8", "a.env: invalid command: No closing quo"),
    ("t.sh", "python flux_train.py --config_file k.toml",
     "config_file: got 'k.toml'; has the options; import it"),
    ("a.env", "A=1", "must be SimpleTuner's: it has none of"),
    ("a.env", "PARAMS_NETWORK_DIM=8", "fluxtrain import-config --from-env"),
]  # fmt: skip

OTHER_KINDS: list[tuple[str, str, str]] = [
    # SimpleTuner
    ("config.json", TUNER + ', "model_flavour": "kontext"}',
     "model_flavour: got 'kontext'; model.condition must be none unless data.images is set"),
    ("config.json", TUNER + ', "--pretrained_model_name_or_path": "b/FLUX.1-Kontext-dev"}',
     "asks for Kontext"),
    ("config.json", TUNER + ', "pretrained_model_name_or_path": "b/FLUX.1-Fill-dev/"}', "asks for Fill"),
    ("config.json", TUNER + ', "model_flavour": "libreflux"}', "asks for LibreFLUX"),
    ("config.json", TUNER + ', "controlnet": "true"}', "controlnet: got 'true'; asks for a ControlNet"),
    ("config.json", TUNER + ', "flux_lora_target": "controlnet"}', "asks for a ControlNet"),
    ("config.json", TUNER + ', "control": true}', "asks for control pictures"),
    ("config.json", TUNER + ', "distillation_method": "dcm"}', "asks for a distillation"),
    ("config.json", TUNER + ', "flow_custom_timesteps": "886,745"}', "asks for a distillation to some"),
    ("config.json", TUNER + ', "slider_lora_target": true}', "asks for a slider"),
    ("config.json", TUNER + ', "layer_freeze_strategy": "bitfit"}', "asks for BitFit"),
    ("config.json", '{"model_family": "chroma", "model_type": "lora"}', "asks for Chroma"),
    ("config.json", '{"model_family": "flux2", "model_type": "lora"}', "asks for FLUX.2"),
    ("config.json", '{"model_family": "wan", "model_type": "lora"}', "asks for another model than FLUX.1"),
    ("config.json", '{"model_flavour": "dev", "model_type": "lora"}',
     "model_family: got null; must be given"),
    ("config.toml", "model_family = 'flux'\nmodel_type = 'lora'\nmodel_flavour = 'kontext'",
     "model_flavour: got 'kontext'; model.condition must be none unless"),
    ("config.env", "export MODEL_TYPE='lora'\nexport MODEL_FAMILY='flux'\n"
     'export TRAINER_EXTRA_ARGS="--lora_rank=8 --model_flavour=kontext"',
     "model_flavour: got 'kontext'; model.condition must be none unless"),
    ("config.env", "export MODEL_TYPE=lora\nexport STABLE_DIFFUSION_3=true", "asks for another model"),
    # ai-toolkit
    ("a.yaml", JOB + "    adapter: {type: redux, train: true}\n    model: {is_flux: true}", "asks for Redux"),
    ("a.yaml", FLUX + "    adapter: {type: ip+}", "asks for an IP-Adapter"),
    ("a.yaml", FLUX + "    adapter: {type: control_lora}", "asks for a control LoRA"),
    ("a.yaml", FLUX + "    adapter: {train: true}", "asks for an adapter for pictures"),
    ("a.yaml", JOB + "    model: {arch: flux_kontext}\n    datasets: [{folder_path: p}]",
     "model.arch: got 'flux_kontext'; model.condition must not be kontext without data.controls"),
    ("a.yaml", JOB + "    model: {arch: flux_kontext}\n"
     "    datasets: [{folder_path: p, control_path: [a, b]}]",
     "pictures as conditions"),
    ("a.yaml", JOB + "    model: {arch: 'flex2'}", "asks for Flex"),
    ("a.yaml", JOB + "    model: {is_flux: true, name_or_path: ostris/Flex.1-alpha}", "asks for Flex"),
    ("a.yaml", JOB + "    model: {arch: 'wan21:14b'}", "asks for another model"),
    ("a.yaml", JOB + "    model: {is_xl: true}", "asks for another model"),
    ("a.yaml", JOB + "    model: {name_or_path: b/FLUX.1-dev}",
     "model.arch: got null; must be given, and flux"),
    ("a.yaml", FLUX + "    datasets: [{folder_path: p}, {folder_path: q, control_path: c}]",
     "pictures as conditions"),
    ("a.yaml", FLUX + "    datasets: [{folder_path: p, controls: [depth]}]", "pictures as conditions"),
    ("a.yaml", FLUX + "    datasets: [{folder_path: p, inpaint_path: i}]", "asks for inpainting"),
    ("a.yaml", FLUX + "    datasets: [{folder_path: p, clip_image_path: i}]", "pictures as prompts"),
    ("a.yaml", FLUX + "    datasets: [{folder_path: p, num_frames: 33}]", "asks for films"),
    ("a.yaml", FLUX + "    datasets: [{folder_path: p}, {folder_path: q, is_reg: true}]",
     "regularisation pictures"),
    ("a.yaml", FLUX.replace("type: lora", "type: loha"), "network.type: got 'loha'; asks for adapters of"),
    ("a.yaml", FLUX + "    embedding: {trigger: t, tokens: 4}", "asks for textual inversion"),
    ("a.yaml", FLUX + "    slider: {targets: [{target_class: c}]}", "asks for a slider"),
    ("a.yaml", FLUX.replace("sd_trainer", "concept_slider"), "type: got 'concept_slider'; asks for a slider"),
    ("a.yaml", FLUX.replace("extension", "generate"), "asks for a job that trains nothing"),
    ("a.json", json.dumps({"job": "extension", "config": {"process": [
        {"type": "diffusion_trainer", "model": {"arch": "flux"}, "network": {"type": "lorm"}}]}}),
     "asks for LoRM"),
    # kohya's sd-scripts
    ("a.toml", LORA + "train_inpainting = true", "asks for inpainting"),
    ("a.toml", LORA + "model_train_type = 'sdxl-lora'", "asks for another model"),
    ("a.toml", LORA + "model_type = 'chroma'", "model_type: got 'chroma'; asks for Chroma"),
    ("a.toml", LORA + "pretrained_model_name_or_path = 'm/flux1-kontext-dev.safetensors'",
     "asks for Kontext"),
    ("a.toml", LORA + "pretrained_model_name_or_path = 'm/sd_xl_base_1.0.safetensors'", "another model"),
    ("a.toml", LORA.replace("lora_flux", "lora_sd3"), "asks for another model"),
    ("a.toml", LORA + "gemma2 = 'g.safetensors'", "asks for another model"),
    ("a.toml", "train_data_dir = 'p'\ncontrolnet_model_name_or_path = 'c'", "asks for a ControlNet"),
    ("a.toml", LORA + "conditioning_data_dir = 'c'", "pictures as conditions"),
    ("a.toml", "network_module = 'lycoris.kohya'\nnetwork_args = ['algo=full']", "asks for LyCORIS' full"),
    ("a.toml", "network_module = 'lycoris.kohya'\nnetwork_args = ['algo=glora']", "adapters of another kind"),
    ("a.toml", LORA.replace("lora_flux", "oft_flux"), "asks for adapters of another kind"),
    ("a.toml", LORA.replace("lora_flux", "dylora"), "asks for adapters of another kind"),
    ("a.json", '{"LoRA_type": "LyCORIS/Diag-OFT", "flux1_checkbox": true}', "adapters of another kind"),
    ("a.json", '{"LoRA_type": "LyCORIS/Native Fine-Tuning", "flux1_checkbox": true}', "LyCORIS' full"),
    ("a.json", '{"LoRA_type": "Flux1", "flux1_checkbox": true, "model_type": "chroma"}', "asks for Chroma"),
    ("a.toml", LORA + "network_train_text_encoder_only = true", "asks for adapters of text encoders alone"),
    ("a.toml", LORA + "token_string = 'x'\nnum_vectors_per_token = 4", "asks for textual inversion"),
    ("a.toml", LORA + "reg_data_dir = 'r'", "asks for DreamBooth's regularisation pictures"),
    ("a.toml", LORA + "beta_dpo = 0.1", "asks for DPO"),
    ("a.toml", "network_dim = 16\ntrain_data_dir = 'p'", "asks for a network, but no network_module"),
    ("t.sh", "accelerate launch flux_train_network.py --model_type chroma --network_dim 4",
     "asks for Chroma"),
]  # fmt: skip
MAX_WIDTH = 600


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "said"), FOREIGN + OTHER_KINDS)
def test_what_is_not_ours_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert main(["import-config", str(file)]) == EXIT_USAGE
    out, error = capsys.readouterr()
    assert not out
    assert said in error
    assert name in error
    assert all(len(line) < MAX_WIDTH for line in error.splitlines())


ACCEPTED: list[tuple[str, str, dict[str, object]]] = [
    ("config.toml", "model_family = 'flux'\nmodel_type = 'lora'\nlora_rank = 12\n",
     {"rank": 12, "kind": "lora"}),
    ("renamed.yaml", "model_family: flux\nmodel_type: lora\nlora_rank: 12\n", {"rank": 12}),
    ("config.env", "export MODEL_TYPE='lora'\nFLUX=true\nLEARNING_RATE=1e-4\nTRAINING_NUM_PROCESSES=1\n"
     "export TRAINER_EXTRA_ARGS=\"--lora_rank=12\"\nTRAINER_EXTRA_ARGS+=\" --controlnet=false\"",
     {"rank": 12}),
    ("env.sh", "#!/bin/bash\nexport MODEL_FAMILY=flux MODEL_TYPE=lora\n"
     'export TRAINER_EXTRA_ARGS="--lora_rank=12"', {"rank": 12}),
    ("config.env", "BASE=/m # the root\nMODEL_FAMILY=flux\nMODEL_TYPE=lora\nLORA_RANK=12 # small\n"
     "INIT_LORA=${BASE}/a.safetensors\nVALIDATION_PROMPT='a $5 bill'",
     {"rank": 12, "initial": "/m/a.safetensors"}),
    ("a.json", json.dumps({"network_module": "networks.lora_flux", "network_dim": 12}), {"rank": 12}),
    ("a.json", "\ufeff" + TUNER + ', "lora_rank": 12}', {"rank": 12}),
    ("a.toml", "\ufeff" + LORA + "network_dim = 12", {"rank": 12}),
    ("a.env", "\ufeffMODEL_FAMILY=flux\nMODEL_TYPE=lora\nLORA_RANK=12", {"rank": 12}),
    ("t.sh", "python flux_train_network.py --network_module networks.lora_flux --network_dim 12 2>&1 | tee l",
     {"rank": 12}),
    ("t.sh", "#!/bin/sh\n# flux_train.py\naccelerate launch \\\n  sd-scripts/flux_train_network.py \\\n"
     '  --network_module networks.lora_flux --network_dim=12 \\\n  --network_args "train_blocks=all" \\\n'
     "  --network_train_unet_only && echo done", {"rank": 12, "clip": None}),
    ("t.sh", "accelerate launch flux_train_network.py --network_module networks.lora_flux \\\n"
     '  --max_grad_norm 0.0 \\--sample_prompts="p.txt" --network_dim 12', {"rank": 12}),
    ("t.bat", "accelerate launch flux_train_network.py --network_module networks.lora_flux ^\r\n"
     "  --max_grad_norm 0.0 ^--sample_prompts=p.txt --network_dim 12", {"rank": 12}),
    ("t.bat", "accelerate launch ^\r\n  flux_train_network.py ^\r\n --network_module networks.lora_flux ^\r\n"
     ' --network_weights "C:\\\\m\\\\a.safetensors"', {"rank": 4, "initial": "C:\\\\m\\\\a.safetensors"}),
    ("a.yaml", JOB + "    model: {is_flux: true}\n    network: {type: lora}", {"rank": 4, "alpha": 4.0}),
    ("a.yaml", FLUX + "    adapter: {}\n    datasets: [{folder_path: p, controls: [], control_path: null}]",
     {}),
    ("a.toml", LORA + "model_train_type = 'flux-lora'", {"kind": "lora"}),
    ("a.json", TUNER + ', "controlnet": false, "control": false, "distillation_method": "none"}',
     {"rank": 16}),
    ("a.toml", LORA + "model_type = 'flux'\nreg_data_dir=''\nmasked_loss = true\nconditioning_data_dir = 'c'",
     {"kind": "lora"}),
    ("a.toml", LORA + "pretrained_model_name_or_path = '/sdxl/chroma/flux1-dev.safetensors'", {"rank": 4}),
    ("a.toml",
     "ae = 'a'\nnetwork_module = 'lycoris.kohya'\nnetwork_dim = 10000\nnetwork_args = ['algo=lokr']",
     {"kind": "lokr", "lokr": {"factor": -1, "decompose_both": False, "full_matrix": True}}),
    ("a.toml",
     "ae = 'a'\nnetwork_module = 'lycoris.kohya'\nnetwork_dim = 8\nnetwork_args = ['algo=loha']",
     {"kind": "loha", "rank": 8, "alpha": 1.0, "split_qkv": False}),
    ("a.json", '{"LoRA_type": "LyCORIS/LoHa", "flux1_checkbox": true, "ae": "a", "network_dim": 8}',
     {"kind": "loha", "rank": 8}),
    ("a.toml",
     "ae = 'a'\nnetwork_module = 'lycoris.kohya'\nnetwork_dim = 8\nnetwork_args = ['algo=locon']",
     {"kind": "lora", "rank": 8, "alpha": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "adapter"), ACCEPTED)
def test_a_file_is_known_by_its_own_options(
    tmp_path: Path, name: str, text: str, adapter: Mapping[str, object]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    found = import_file(file, {}).config.adapter
    assert found is not None
    assert {key: value for key, value in found.model_dump().items() if key in adapter} == adapter


MODELS = {
    "black-forest-labs/FLUX.1-dev": None,
    "black-forest-labs/FLUX.1-Krea-dev": None,
    "/models/flux_dev.safetensors": None,
    "C:\\sdxl\\flux1-dev.safetensors": None,
    "/cache/models--black-forest-labs--FLUX.1-Kontext-dev/snapshots/" + "a" * 40 + "/": "Kontext",
    "FLUX.1-Kontext-dev/transformer/diffusion_pytorch_model-00001-of-00003.safetensors": "Kontext",
    "FLUX.1-Depth-dev": "control pictures",
    "lodestones/Chroma1-HD": "Chroma",
    "black-forest-labs/FLUX.2-dev": "FLUX.2",
    "Freepik/flux.1-lite-8B": "FLUX.1 lite",
    "ostris/OpenFLUX.1": "LibreFLUX",
    "Wan-AI/Wan2.1-T2V-14B": "another model",
    "Qwen/Qwen-Image": "another model",
}


@pytest.mark.parametrize(("name", "kind"), MODELS.items())
def test_the_name_of_a_model_says_its_kind(name: str, kind: str | None) -> None:
    found = of_model(name)
    assert found is None if kind is None else (found or "").startswith(kind)


def test_a_field_that_states_what_is_trained_lets_a_file_pass(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(LORA + "reg_data_dir = 'r'\npretrained_model_name_or_path = 'kontext'")
    stated = ["--data.images=d.toml", "--initial_weights=flux1-dev.safetensors"]
    assert main(["import-config", str(file), *stated]) == EXIT_OK
    assert main(["import-config", str(file), stated[0]]) == EXIT_USAGE


def test_conditions_and_algorithms_of_named_files_are_kinds_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ', "data_backend_config": "b.json", "lora_type": "lycoris", "lycoris_config": "l.json"}'
    (tmp_path / "config.json").write_text(TUNER + named)
    condition = (
        '{"id": "c", "dataset_type": "conditioning", "conditioning_type": "reference_strict"}'
    )
    (tmp_path / "b.json").write_text(f'{SETS}, "conditioning_data": "c"}}, {condition}]')
    (tmp_path / "l.json").write_text('{"algo": "full"}')
    assert main(["import-config", str(tmp_path / "config.json")]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "conditioning_type: got 'reference_strict'; asks for pictures as conditions" in error
    assert "lycoris.algo: got 'full'; asks for LyCORIS' full" in error


def test_strict_refuses_every_lost_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    names = [f"made_up_{n}" for n in range(12)]
    lost = "".join(f"{name} = 1\n" for name in names) + "huggingface_repo_id = 'o/n'\n"
    file.write_text(LORA + lost + "huggingface_token = 'hidden'\n")
    assert main(["import-config", str(file), "--strict"]) == EXIT_USAGE
    out, error = capsys.readouterr()
    assert not out
    assert all(name in error for name in (*names, "huggingface_repo_id"))
    assert "hidden" not in error
    file.write_text(LORA + "max_train_steps = 5\n")
    assert main(["import-config", str(file), "--strict"]) == EXIT_OK


def test_what_prodigy_and_restarts_need_is_not_lost_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    prodigy = (
        "optimizer_type = 'prodigy'\nlearning_rate = 1.0\nlr_scheduler = 'cosine_with_restarts'\n"
    )
    file.write_text(LORA + prodigy + "network_args = ['loraplus_lr_ratio=4']\n")
    assert main(["import-config", str(file)]) == EXIT_OK
    report = capsys.readouterr().err
    assert "network_args.loraplus_lr_ratio=4: Prodigy finds one step size" in report
    assert "lr_scheduler_num_cycles=1 (not given): schedule.cycles=1" in report


def test_lion_of_simpletuner_has_its_package_s_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        TUNER + ', "optimizer": "optimi-lion", "learning_rate": 2e-5, "adam_beta2": 0.5}'
    )
    optim = import_file(file, {}).config.optim
    assert (optim.name, optim.learning_rate) == ("lion", 2e-5)
    assert (optim.beta1, optim.beta2, optim.weight_decay) == (0.9, 0.99, 0.0)


GUI = {
    "flux1_checkbox": True, "LoRA_type": "Flux1", "network_dim": 16, "network_alpha": 8, "optimizer": "AdamW",
    "optimizer_args": 'weight_decay=0.1 "eps=1e-6"', "max_resolution": "768,768", "unet_lr": 3e-4,
    "text_encoder_lr": 0, "lr_scheduler": "cosine", "lr_warmup": 10, "max_train_steps": 500, "seed": 0,
    "train_batch_size": 2, "single_dim": 4, "factor": -1, "conv_dim": 1, "xformers": "sdpa",
    "loss_type": "l2", "epoch": 3, "timestep_sampling": "sigmoid", "guidance_scale": 1, "num_processes": 1,
    "max_data_loader_n_workers": 0, "sdxl_no_half_vae": True, "flux1_clip_l": "c.safetensors",
    "model_prediction_type": "raw",
}  # fmt: skip
"""Settings as the GUI for sd-scripts saves them, those that are 0 too."""


def test_the_gui_s_settings_become_those_of_sd_scripts(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(GUI))
    found = import_file(file, {})
    config = found.config
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.clip) == (16, 8.0, None)
    assert config.adapter.ranks.single == 4
    assert (config.optim.weight_decay, config.optim.epsilon) == (0.1, 1e-6)
    assert (config.schedule.steps, config.schedule.warmup_steps) == (500, 50)
    assert (config.data.image_size, config.optim.learning_rate) == (768, 3e-4)
    assert (config.seed, config.data.num_workers) == ("random", 0)
    assert not found.lines[Disposition.UNKNOWN]
    assert not found.lines[Disposition.MISSING]


def test_what_the_gui_adds_to_the_command_wins_as_in_sd_scripts(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    more = '--fp8_base --train_batch_size 4 --seed=7 --network_args "train_blocks=single"'
    file.write_text(json.dumps(GUI | {"additional_parameters": more}))
    found = import_file(file, {})
    config = found.config
    assert config.adapter is not None
    assert (config.adapter.base_dtype, config.adapter.double_blocks) == ("fp8", "none")
    assert (config.schedule.global_batch_size, config.seed) == (4, 7)
    assert not found.lines[Disposition.UNKNOWN]


WRONG: list[tuple[str, object]] = [
    ("additional_parameters", "--seed '7"), ("additional_parameters", "--seed $SEED"),
    ("unet_lr", "x"), ("lr_warmup", [1]), ("max_train_steps", {"a": 1}), ("max_train_steps", 1e308),
    ("text_encoder_lr", True), ("optimizer_args", "decouple"), ("LoRA_type", ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_settings_of_the_gui_are_refused_in_words(
    tmp_path: Path, name: str, value: object
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(GUI | {name: value}))
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        import_file(file, {})


def test_the_gui_s_epochs_and_lokr_are_those_of_sd_scripts(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    lokr = {"LoRA_type": "LyCORIS/LoKr", "factor": 8, "max_train_steps": 0, "ae": "a"}
    file.write_text(json.dumps(GUI | lokr))
    config = import_file(file, {}).config
    assert config.schedule.epochs == 3
    assert config.adapter is not None
    assert (config.adapter.kind, config.adapter.lokr.factor) == ("lokr", 8)


def test_options_in_a_list_of_the_shell_are_variables(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text('ARGS=(\n  --ae a\n)\naccelerate launch "flux_train.py" "${ARGS[@]}"\n')
    with pytest.raises(ConfigError, match=re.escape("got '${ARGS[@]}'; must not have variables")):
        read_options(file)


def test_lines_of_options_belong_to_the_command(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(
        "accelerate launch flux_train.py\n --ae a\n--max_train_steps 9\n\necho --ae b\n"
    )
    assert read_options(file)[1] == {"ae": "a", "max_train_steps": "9"}


def test_a_flavour_of_other_weights_is_named(tmp_path: Path) -> None:
    file, lost = tmp_path / "config.json", list[bool]()
    for rest in ('"krea"', '"dev"', '"krea", "pretrained_model_name_or_path": "b/FLUX.1-Krea-dev"'):
        file.write_text(f'{TUNER}, "model_flavour": {rest}}}')
        missing = import_file(file, {}).lines[Disposition.MISSING]
        lost.append("model_flavour" in {line.option for line in missing})
    assert lost == [True, False, False]


def test_values_of_a_command_are_as_the_shell_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(
        "python flux_train.py --output_name 'a b' --optimizer_args d_coef=2 --sdpa # end"
    )
    _, options = read_options(file)
    assert options == {"output_name": "a b", "optimizer_args": ["d_coef=2"], "sdpa": True}
