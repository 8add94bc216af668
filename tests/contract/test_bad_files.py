"""Wrong files and options: one line with the field's path, the given value and the allowed ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.contract.bad_specs import GOOD, MISSING, Manifest, changed

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_USAGE

LORA: dict[str, Any] = {"preset": "dev-lora"}
NO_EVALUATION = {"preset": "micro", "evaluation": {"every_samples": 0, "at_end": False}}
# (path of the change, value, the line on stderr that names it)
BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("apiVersion", "v1", "apiVersion: got 'v1'; must be one of fluxtrain.dev/v1alpha1, "),
    ("kind", MISSING, "kind: must be given: FluxTraining"),
    ("metadata", MISSING, "metadata: must be given: a mapping with some of name"),
    ("metadata.name", "Job_1", "metadata.name: got 'Job_1'; must be a name of 1 to 63"),
    ("spec.run", MISSING, "spec.run: must be given"),
    ("spec.run", [], "spec.run: got []; must be a mapping"),
    ("spec.gpuPerNode", 8, "spec.gpuPerNode: no such field; did you mean gpusPerNode?"),
    ("spec.gpusPerNode", -1, "spec.gpusPerNode: got -1; must be a whole number from 0 to 64"),
    ("spec.gpusPerNode", "8", "spec.gpusPerNode: got '8'; must be a whole number"),
    ("spec.nodes", {"min": 4, "max": 2}, "spec.nodes.min: got 4; must be at most max; max is 2"),
    ("spec.nodes.count", 3, "spec.nodes.count: no such field; there are min, max"),
    ("spec.storage.data", {}, "spec.storage.data: exactly one of persistentVolumeClaim, hostPath"),
    ("spec.restart.onExitCodes", [0], "spec.restart.onExitCodes[0]: got 0; must be a whole number"),
    ("spec.restart.noProgressSeconds", 1, "got 1; must be a whole number from 30 to 86400 or null"),
    ("spec.lifecycle.cleanPods", "Some", "got 'Some'; must be one of None, Running, All"),
    ("spec.lifecycle.suspend", "yes", "spec.lifecycle.suspend: got 'yes'; must be true or false"),
    ("spec.scheduling.tolerations", [{"operator": "Maybe"}],
     "spec.scheduling.tolerations[0].operator: got 'Maybe'; must be one of Exists, Equal"),
    ("spec.scheduling.nodeSelector", {"zone": "a b"},
     "spec.scheduling.nodeSelector.zone: got 'a b'; must be text of at most 63 characters like ^"),
    ("spec.network.env", "A=1", "must be a list of at most 64 entries, each a mapping with some of name,"),
    ("spec.network.env", [{"name": "PET_NNODES", "value": "3"}],
     "spec.network.env[0].name: got 'PET_NNODES'; must not begin with PET_ or FLUXTRAIN_"),
    ("spec.network.env", [{"name": "A", "value": 3}], "spec.network.env[0].value: got 3; must be text"),
    ("spec.podTemplate.spec.volumes", 1, "each a mapping with some of name or null"),
    ("spec.run", NO_EVALUATION | {"data": {"validation": None}},
     "data.validation: null is dropped by kubectl apply, and 'validation' would remain; write none"),
    ("spec.run.logging", {"straggler_factor": None},
     "logging.straggler_factor: null is dropped by kubectl apply, and 1.2 would remain; give a value"),
    ("spec.run.preset", MISSING, "spec.run.preset: must be given: one of mlperf-schnell,"),
    ("spec.run.preset", ["micro"], "spec.run.preset: got ['micro']; must be one of"),
    ("spec.run.task", "preprocess", "spec.run.data.source: got 'synthetic'; must be images if task is"),
    ("spec.run", LORA | {"initial_weights": None},
     "spec.run.initial_weights: must name the weights that the adapters change"),
    ("spec.run", LORA | {"task": "sample"},
     "spec.run.task: got 'sample'; must be one of train, benchmark if adapter is set: it trains"),
    ("spec.run", LORA | {"precision": {"fp8": "rowwise"}},
     "spec.run.precision.fp8: got 'rowwise'; must be none if adapter is set: frozen weights"),
    ("spec.run", LORA | {"precision": {"weights": "bfloat16"}},
     "spec.run.precision.weights: got 'bfloat16'; must be float32 if adapter is set: adapters always are"),
    ("spec.run", LORA | {"adapter": {"double_blocks": "0,17-19"}},
     "spec.run.adapter.double_blocks: got '0,17-19'; there is no block 19; the model has 19, from 0"),
    ("spec.run", LORA | {"adapter": {"double_blocks": 19}},
     "spec.run.adapter.double_blocks: got '19'; there is no block 19; the model has 19, from 0"),
    ("spec.run", LORA | {"adapter": {"single_blocks": True}},
     "spec.run.adapter.single_blocks: got true; must be all, none, or numbers from 0 and ranges of them"),
    ("spec.run", LORA | {"adapter": {"single_blocks": -1}},
     "spec.run.adapter.single_blocks: got '-1'; must be all, none, or numbers from 0 and ranges of them"),
    ("spec.run", LORA | {"adapter": {"single_blocks": "4-2"}},
     "spec.run.adapter.single_blocks: got '4-2'; the range 4-2 is empty"),
    ("spec.run", LORA | {"adapter": {"double_blocks": "none", "ranks": {"single": 0, "single_mod": 0}}},
     "must leave at least one layer an adapter"),
    ("spec.run", LORA | {"adapter": {"single_blocks": "none", "layers": ["img_attn.qkv", "linear1"]}},
     "spec.run.adapter.layers[1]: got 'linear1'; must be a layer of the selected blocks"),
    ("spec.run", LORA | {"adapter": {"ranks": {"img_mlp": 0}, "layers": ["img_mlp.2", "linear1"]}},
     "spec.run.adapter.layers[0]: got 'img_mlp.2'; must be a layer of the selected blocks"),
    ("spec.run", LORA | {"data": {"images": "a"}, "optim": {"name": "prodigy", "learning_rate": 1.0},
                         "adapter": {"clip": {"up": 4.0}}},
     "spec.run.adapter.clip.up: got 4.0; must be 1 if optim.name is prodigy: it finds one step size"),
    ("spec.run", LORA | {"adapter": {"rank": "16"}},
     "spec.run.adapter.rank: got '16'; must be a whole number"),
    ("spec.run.optim.learning_rate", "fast", "got 'fast'; must be a number above 0 and at most 10"),
    ("spec.run.optim.learning_rate", float("nan"), "spec.run.optim.learning_rate: got nan"),
    ("spec.run.optim.learning_rate", float("inf"), "spec.run.optim.learning_rate: got inf"),
    ("spec.run.optim.learningRate", 1e-4, "optim.learningRate: no such field; did you mean learning_rate?"),
    ("spec.run.optim.lr", 1e-4, "spec.run.optim.lr: no such field; did you mean learning_rate?"),
    ("spec.run.optim.beta2", 1.0, "got 1.0; must be a number at least 0 and below 1"),
    ("spec.run.optim", None, "spec.run.optim: got null; must be a mapping with some of name, learning_rate"),
    ("spec.run.schedule.steps", True, "spec.run.schedule.steps: got true; must be a whole number"),
    ("spec.run.steps", 5, "spec.run.steps: no such field; did you mean schedule.steps?"),
    ("spec.run.epochs", 5, "spec.run.epochs: no such field; did you mean schedule.epochs?"),
    ("spec.run.preset", "micor", "openmoji, micro; did you mean micro?"),
    ("spec.run.preset", "dev_lora", "; did you mean dev-lora?"),
    ("spec.run.preset", "flux-dev", "; did you mean dev-finetune or dev-lora?"),
    ("spec.run.adapter.network_dim", 5, "network_dim: no such field; did you mean spec.run.adapter.rank?"),
    ("spec.run.data.trigger_word", "x", "no such field; did you mean spec.run.data.caption_prefix?"),
    ("spec.run.adapter.learning_rate", 1, "did you mean spec.run.optim.learning_rate?"),
    ("spec.run.schedule.epochs", "20", "or null; a number has neither quotes, commas nor a unit"),
    ("spec.run.optim.learning_rate", "0,0002", "at most 10; a number has neither quotes, commas nor a unit"),
    ("spec.run.data.download.max_bytes", "20GB", "; a number has neither quotes, commas nor a unit"),
    ("spec.run.schedule.gbs", 5, "schedule.gbs: no such field; did you mean global_batch_size?"),
    ("spec.run.schedule.min_learning_rate", 1.0,
     "spec.run.schedule.min_learning_rate: got 1.0; must be at most optim.learning_rate"),
    ("spec.run.model.num_heads", 5, "spec.run.model.hidden_size: got 32; must be a multiple of num_heads"),
    ("spec.run.model.axes_dim", [4, 6, 8], "spec.run.model.axes_dim: got [4, 6, 8]; must sum to"),
    ("spec.run.model.axes_dim", [4, 12], "spec.run.model.axes_dim[2]: must be given"),
    ("spec.run.model.axes_dim", [5, 5, 6], "axes_dim[0]: got 5; must be a whole number"),
    ("spec.run.model.in_channels", 6, "got 6; must be a whole number from 4 to 4096, a multiple of 4"),
    ("spec.run.data.train", "a\nb", r"spec.run.data.train: got 'a\nb'; must be a path"),
    ("spec.run.data.max_bad_fraction", 2, "got 2; must be a number from 0 to 1"),
    ("spec.run.evaluation.target_loss", 0, "got 0; must be a number above 0 and at most 1e6 or null"),
    ("spec.run.sampling.prompts", ["a", 1], "spec.run.sampling.prompts[1]: got 1; must be text"),
]  # fmt: skip
"""One of each kind of message; ``bad_specs`` has all fields."""

BAD_TEXTS: list[tuple[str, str, str]] = [
    ("empty", "", "got null; must be one FluxTraining, a mapping with apiVersion and kind"),
    ("a list", "- a", "got ['a']; must be one FluxTraining"),
    ("a tab", "a:\n\t- b", "line 2, column 1: invalid YAML: tabs are not allowed"),
    ("an open bracket", "a: [1", "invalid YAML"),
    ("two documents", "---\na: 1\n---\nb: 2", "more than one document; use one file per job"),
    ("a key twice", "a: 1\na: 2", "line 2, column 1: invalid YAML: duplicate key 'a'"),
    ("a list as a key", "spec: {[1]: 2}", "line 1, column 8: invalid YAML: a key must be"),
    ("a mapping as a key", "? {a: 1}\n: 2", "a key must be a string or a number"),
    ("an alias", "a: &x [1]\nb: *x", "aliases are not read"),
    ("a Python object", "a: !!python/object/apply:os.system [ls]", "invalid YAML"),
    ("too deep", "[" * 1000, "invalid YAML"),
    ("too large", "#" * (2 << 20), "got '2097152 bytes'; at most 1048576 are read"),
]  # fmt: skip

BAD_FLAGS: list[tuple[list[str], str]] = [
    (["--optim.lr=1"], "--optim.lr: no such field; did you mean learning_rate?"),
    (["--optimize.beta1=1"], "--optimize.beta1: no such field; did you mean optim?"),
    (["--seed.x=1"], "--seed.x: no such field"),
    (["--lr=1"], "--lr: no such field; did you mean --optim.learning_rate?"),
    (["--learning_rate=1"], "did you mean --optim.learning_rate?"),
    (["--optim.steps=1"], "--optim.steps: no such field; did you mean --schedule.steps?"),
    (["--steps=9"], "--steps: no such field; did you mean --schedule.steps?"),
    (["--max_train_steps=9"], "did you mean --schedule.steps?"),
    (["--epochs=9"], "did you mean --schedule.epochs?"),
    (["--batch_size=9"], "mean --schedule.global_batch_size or --parallel.micro_batch_size?"),
    (["--batch-size", "9"], "mean --schedule.global_batch_size or --parallel.micro_batch_size?"),
    (["--rank=9"], "did you mean --adapter.rank?"),
    (["--gpus=2"], "did you mean --processes of run, or spec.gpusPerNode of the file?"),
    (["--dry-run"], "--dry-run: no such field; did you mean fluxtrain plan FILE?"),
    (
        ["-o", "x"],
        "arguments: got '-o'; fields are set as --section.field=value; did you mean --output?",
    ),
    (["--network_dim=9"], "did you mean --adapter.rank?"),
    (["--resolution=9"], "did you mean --data.image_size or --data.buckets.resolutions?"),
    (["--output_dir=x"], "--output_dir: no such field; did you mean --output?"),
    (["--data_dir=x"], "did you mean --data or --data.images?"),
    (["--seed=1", "--seed=2"], "--seed: got '2'; was already set to 1; set it once"),
    (
        ["--schedule.steps=1", "--schedule.steps", "2"],
        "schedule.steps: got '2'; was already set to 1",
    ),
    (["--data=a", "--data=b"], "--data: got 'b'; was already set to a; set it once"),
    (["--seed"], "--seed: needs a value: --seed=VALUE"),
    (["--seed", "--task=train"], "--seed: needs a value"),
    (["stray"], "arguments: got 'stray'; fields are set as --section.field=value"),
    (["--seed=[1"], "--seed line 1, column 3: invalid YAML"),
    (["--seed=1.5"], "spec.run.seed: got 1.5; must be a whole number"),
    (
        ["--flow=3", "--flow.shift=1"],
        "--flow.shift: got '1'; --flow was already set to 3; set it once",
    ),
    (
        ["--flow.shift=1", "--flow={}"],
        "--flow: got '{}'; --flow.shift was already set to 1; set it once",
    ),
    (["--processes=0"], "--processes: got 0; must be between 1 and 1024"),
]


Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that runs ``fluxtrain run`` on a file and returns its errors.

    Nothing may have been written.
    """

    def run(content: bytes | Manifest | None, *flags: str) -> str:
        file, output = tmp_path / "job.yaml", tmp_path / "run"
        if content is not None:
            is_text = isinstance(content, bytes)
            file.write_bytes(content if is_text else yaml.safe_dump(content).encode())
        code = main(["run", str(file), "--output", str(output), *flags])
        stderr = capsys.readouterr().err
        assert code == EXIT_USAGE, stderr
        assert "Traceback" not in stderr
        assert not output.exists()
        return stderr

    return run


@pytest.mark.parametrize(("path", "value", "line"), BAD_FIELDS)
def test_a_bad_field_is_reported_with_given_and_allowed_values(
    path: str, value: Any, line: str, refused: Refused
) -> None:
    stderr = refused(changed(GOOD, path, value))
    assert line in stderr
    assert len(stderr.splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "line"), [row[1:] for row in BAD_TEXTS], ids=[row[0] for row in BAD_TEXTS]
)
def test_an_invalid_file_is_reported_with_its_line(text: str, line: str, refused: Refused) -> None:
    stderr = refused(text.encode())
    assert "/job.yaml" in stderr
    assert line in stderr
    assert len(stderr.splitlines()) == 1


FOREIGN = {
    "kohya.toml": "pretrained_model_name_or_path = 'flux1-dev.safetensors'",
    "torchtitan.toml": "[job]\ndump_folder = 'x'",
    "ai-toolkit.yaml": "job: extension\nconfig:\n  name: x",
    "config.json": '{"--model_family": "flux"}',
    "config.env": "MODEL_FAMILY=flux",
    "train.sh": "accelerate launch flux_train_network.py --network_dim 4",
}
BARE = {"bare.yaml": "preset: dev-lora\ndata: {images: good}\n"}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *((name, f"fluxtrain import-config {name} writes one") for name in FOREIGN),
        ("bare.yaml", "is spec.run of a FluxTraining: put it there"),
        ("cats", "fluxtrain init cats writes a file"),
        ("micor.yaml", "micor.yaml: cannot be read (No such file or directory); did you mean micro.yaml?"),
        ("demo.yml", "(No such file or directory); did you mean examples/demo.yaml?"),
        ("my-cats", "(No such file or directory); of a folder of pictures, fluxtrain init FOLDER"),
        ("a.safetensors", "to train, and fluxtrain sample a.safetensors makes images with them"),
        ("a.png", "a.png: is a picture; fluxtrain init . writes a file for its folder"),
        ("cats/b.JPG", "b.JPG: is a picture; fluxtrain init cats writes a file for its folder"),
    ],
)  # fmt: skip
def test_what_is_no_job_s_file_leads_to_one(
    name: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    others = dict.fromkeys(("micro.yaml", "examples/demo.yaml", "a.png", "cats/b.JPG"), "\xff")
    for each, text in (FOREIGN | BARE | others).items():
        Path(each).parent.mkdir(exist_ok=True)
        Path(each).write_text(text, "latin-1")
    for command in ("run", "plan"):
        assert main([command, name]) == EXIT_USAGE
        (error,) = capsys.readouterr().err.splitlines()
        assert line in error
        assert name not in FOREIGN or "must be " in error


def test_all_unknown_options_are_reported(refused: Refused) -> None:
    flags = [f"--field{i}=1" for i in range(18)] + ["--training.steps=4", "--seed"]
    lines = refused(GOOD, *flags).splitlines()
    assert len(lines) == 20
    assert all(any(f"{flag.partition('=')[0]}: " in line for line in lines) for flag in flags)


@pytest.mark.parametrize(("flags", "line"), BAD_FLAGS)
def test_a_bad_option_is_reported(flags: list[str], line: str, refused: Refused) -> None:
    assert line in refused(GOOD, *flags)


def test_a_missing_file_and_a_binary_file_are_reported(refused: Refused) -> None:
    assert "cannot be read (No such file" in refused(None)
    assert "not UTF-8 text (byte 0)" in refused(b"\xff\xfe\x00")


def test_all_errors_are_reported_at_once(refused: Refused) -> None:
    run = {"preset": "micro", "seed": "x", "schedule": {"steps": 0}, "optim": {"lr": 3}}
    stderr = refused(changed(GOOD, "spec.run", run))
    assert [line.split(": got")[0] for line in stderr.splitlines()] == [
        "fluxtrain: error: spec.run.seed",
        "spec.run.optim.lr: no such field; did you mean learning_rate?",
        "spec.run.schedule.steps",
    ]
