"""``fluxtrain init``: the file that it writes for a folder of pictures fits the GPU, and runs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from PIL import Image
from tests.trainer.commands import command, fluxtrain
from tests.trainer.tiny_encoders import CHANNELS, TOKENS, WIDTH, write_encoders
from tests.trainer.tiny_model import initialised, save_flux, tiny_model

from fluxtrain.cli import main
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.pictures import subset
from fluxtrain.errors import EXIT_OK, EXIT_USAGE
from fluxtrain.plan.estimate import make_plan
from fluxtrain.runtime.devices import GPUS

pytestmark = pytest.mark.slow

SIZES = [(96, 64), (64, 96), (80, 80)]


def write_pictures(folder: Path, count: int = 6, captions: int = 0, scale: int = 2) -> Path:
    folder.mkdir()
    for index in range(count):
        width, height = SIZES[index % 3]
        picture = Image.new("RGB", (scale * width, scale * height), (40 * index, 90, 160))
        picture.save(folder / f"{index}.png")
        if index < captions:
            (folder / f"{index}.txt").write_text(f'a "red" thing,\nnumber {index}')
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of pictures with more than a million pixels each."""
    return write_pictures(tmp_path_factory.mktemp("large") / "cats", scale=16)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATAROOT", "MODELROOT", "LOGDIR", "FLUXTRAIN_DATA", "FLUXTRAIN_MODELS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def init(*words: str) -> int:
    return main(["init", *words])


def written(file: str) -> RunConfig:
    return resolve(load_job(Path(file)).spec.run)


@pytest.mark.parametrize("gpu", GPUS)
def test_the_file_fits_each_gpu_by_plan(here: Path, large: Path, gpu: str) -> None:
    assert init(str(large), "--trigger=ohwx", f"--gpu={gpu}") == EXIT_OK
    config = written("cats.yaml")
    assert (config.data.image_size, config.parallel.micro_batch_size) == (1024, "auto")
    plan = make_plan(config, 1, 1, gpu)
    assert plan.fits, plan
    assert plan.micro_batch_size >= 1
    dear = GPUS[gpu].memory_bytes < 20 << 30
    assert (config.parallel.offload_blocks > 0) == dear, "only where nothing cheaper fits"


def test_captions_become_prompts_and_the_trigger_comes_before_each(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(here / "My Cats", captions=6)
    assert init("My Cats", "--trigger=ohwx", "--gpu=mi300x", "--base=schnell") == EXIT_OK
    config = written("my-cats.yaml")
    assert config.preset == "schnell-lora"
    assert str(config.data.images) == str(here / "My Cats")
    assert config.data.caption_prefix == "ohwx"
    assert config.data.buckets is not None
    assert config.data.image_size == 512, "the pictures are smaller still"
    assert config.sampling.prompts[0] == 'ohwx a "red" thing, number 0'
    assert len(config.sampling.prompts) == 3
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("my-cats.yaml: 6 pictures, 300 steps of 4 on 1 × MI300X, ")
    assert said[1] == "  fetch  fluxtrain fetch my-cats.yaml"
    assert said[2].endswith("of an account that accepted the licence of FLUX.1-schnell)")
    assert said[-2] == "  run    fluxtrain run my-cats.yaml"
    assert said[-1].endswith("runs/my-cats/gallery.html")


@pytest.mark.parametrize(
    ("base", "control", "weights"),
    [
        ("kontext", "control", "flux1-kontext-dev.safetensors"),
        ("fill", "mask", "flux1-fill-dev.safetensors"),
        ("fill", None, "flux1-fill-dev.safetensors"),
        ("canny", "control", "flux1-canny-dev.safetensors"),
    ],
)
def test_pairs_are_found_by_their_folders(
    here: Path, base: str, control: str | None, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["target", control] if control else []
    (here / "edits").mkdir()
    for name in names:
        write_pictures(here / "edits" / str(name), captions=6)
    if not names:
        write_pictures(here / "edits/all", captions=6)
    if control:
        (here / f"edits/{control}/0.png").unlink()
        for path in (here / f"edits/{control}").glob("*.png"):
            size = (192, 128) if base == "kontext" else SIZES[int(path.stem) % 3]
            Image.new("L", size, 255).save(path)
    assert init("edits", "--gpu=mi300x", f"--base={base}") == EXIT_OK
    config = written("edits.yaml")
    assert (config.model.condition, config.initial_weights) == (base, weights)
    assert config.model.out_channels == 64
    folder = str(here / "edits")
    found = (config.data.images, config.data.controls)
    assert found == ((f"{folder}/target", f"{folder}/{control}") if control else (folder, None))
    assert make_plan(config, 1, 1, "MI300X").fits
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"edits.yaml: {5 if control else 6} pictures, ")
    assert f"the licence of FLUX.1-{base.capitalize()}-dev" in said[4 if control else 2]


def test_a_trigger_that_all_captions_have_is_not_said_twice(here: Path) -> None:
    write_pictures(here / "cats", captions=6)
    assert init("cats", "--trigger=thing", "--gpu=mi300x") == EXIT_OK
    config = written("cats.yaml")
    assert config.data.caption_prefix == ""
    assert config.sampling.prompts[0] == 'a "red" thing, number 0'


def test_square_pictures_need_no_buckets(here: Path) -> None:
    folder = write_pictures(here / "cats", count=0)
    Image.new("RGB", (900, 900)).save(folder / "a.png")
    assert init("cats", "--trigger=ohwx", "--gpu=mi300x") == EXIT_OK
    config = written("cats.yaml")
    assert (config.data.buckets, config.data.image_size) == (None, 768)
    assert config.sampling.prompts == ["ohwx", "a photo of ohwx", "a drawing of ohwx"]


def test_several_nodes_take_pictures_of_a_volume(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(here / "cats")
    words = "--trigger=ohwx", "--gpu=h100", "--nodes=2", "--gpus-per-node=8"
    assert init("cats", *words) == EXIT_OK
    config, job = written("cats.yaml"), load_job(Path("cats.yaml"))
    assert str(config.data.images) == "cats"
    assert (job.spec.nodes.min, job.spec.nodes.max, job.spec.gpus_per_node) == (2, 2, 8)
    assert config.schedule.global_batch_size == 16
    assert make_plan(config, 2, 8, "H100").fits
    assert "kubectl apply -f cats.yaml" in capsys.readouterr().out


def test_the_smallest_gpu_of_this_machine_counts(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [SimpleNamespace(name="NVIDIA Something", total_memory=size << 30) for size in (48, 24)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    write_pictures(here / "cats")
    assert init("cats", "--trigger=ohwx") == EXIT_OK
    assert load_job(Path("cats.yaml")).spec.gpus_per_node == 2
    assert "on 2 × NVIDIA Something, " in capsys.readouterr().out
    found[1].total_memory = 3 << 30
    assert init("cats", "--trigger=ohwx", "--force") == EXIT_USAGE
    error = capsys.readouterr().err
    assert "has 3.00 GiB, which no setting fits; the smallest that does is RX 9070 XT" in error


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["cats"], "--gpu: torch sees no GPU here; name the one that it will run on, such as --g"),
        (["cats", "--gpu=rtx1"], "--gpu: got 'rtx1'; known: MI250X, "),
        (["cats", "--gpu=Radeon RX 7900 XTX"], "; did you mean RX 7900 XTX? known: MI250X, "),
        (["cats", "--gpu=4090"], "; did you mean RTX 4090? known: MI250X, "),
        (
            ["cats", "--gpu=CPU"],
            "--gpu: got 'CPU'; is no GPU; --base=demo, the model of `make run`, tra",
        ),
        (["cats", "--gpu=2xMI300X"], "must be one model: --gpu=mi300x --gpus-per-node=2"),
        (["cats", "--gpu=h100", "--name=x"], "; set metadata.name in the file that init writes"),
        (["job.yaml"], "'job.yaml'; is a FluxTraining already: fluxtrain run job.yaml trains it"),
        (["cats", "--gpu=h100"], "--trigger: no picture has a caption: give a word"),
        (
            ["tables", "--gpu=h100"],
            "--trigger=ohwx; captions.csv is not read: a metadata file is metadata.jsonl, .csv or ",
        ),
        (
            ["one", "--gpu=h100", "--base=kontext"],
            "has 1 picture to train: FLUX.1 Kontext [dev] needs two, one to look at; 1.png: ",
        ),
        (["dogs", "--gpu=h100"], "PICTURES: got 'dogs'; must be a folder; there is none here, n"),
        (["none", "--gpu=h100"], "none: holds no pictures ("),
        (["none", "--gpu=h100"], "); put some there"),
        (["t.zip"], "PICTURES: got 't.zip'; is an archive; unpack it, and name its folder"),
        (["t.tar.gz"], "PICTURES: got 't.tar.gz'; is an archive; unpack it, and name its folder"),
        (["cats/1.png"], "PICTURES: got 'cats/1.png'; is one picture; name its folder"),
        (
            ["https://a.b/cats"],
            "PICTURES: got 'https://a.b/cats'; is an address: download its pictu",
        ),
        (
            ["s3://cats"],
            "'s3://cats'; is an address: download its pictures and name their folder, or set ",
        ),
        (["bad", "--gpu=h100"], "bad: 2 of 6 pictures cannot be used; at most a tenth may be"),
        (["bad", "--gpu=h100"], "skipped latin.png: its caption latin.txt is not UTF-8"),
        (["bad", "--gpu=h100"], "\nmend or remove the files; captions must be UTF-8\n"),
        (["cats", "--steps=5"], "; set spec.run.schedule.epochs in the file that init writes"),
        (["cats", "--lr=1"], "; set spec.run.optim.learning_rate in the file that init writes"),
        (
            ["cats", "-o", "x.yaml"],
            "arguments: got '-o x.yaml'; no such option; did you mean --output?",
        ),
        (["cats", "--gpus=2"], "--gpus=2'; no such option; did you mean --gpus-per-node?"),
        (["cats", "--base=kontext"], "cats'; lacks target and control: FLUX.1 Kontext [dev] make"),
        (["cats", "--base=sd15"], "--base: got 'sd15'; must be dev or schnell or kontext or fill"),
        (["cats"], "; or --base=demo, the model of `make run`, which trains on a CPU"),
        (
            ["cats", "--base=demo", "--gpu=h100"],
            "--gpu: got 'h100'; must be left out with --base=d",
        ),
        (["cats", "--base=demo", "--nodes=2"], "--nodes: got 2; must be 1 with --base=demo"),
        (["pairs", "--gpu=h100"], "holds pairs, in masks, target: name "),
        (
            ["pairs", "--gpu=h100", "--base=fill"],
            "of bases, kontext takes control, fill takes mask",
        ),
        (["cats", "--gpu=h100", "--nodes=0"], "--nodes: got 0; must be between 1 and "),
        (["cats", "--output=kept.yaml"], "--output: got 'kept.yaml'; exists already; name anoth"),
        (["cats", "--output=kept.yaml", "--force"], "it is no FluxTraining"),
        (["cats", "--output=cats/1.png", "--force"], "it is no FluxTraining"),
        (["cats", "--gpu=h100", "--trigger= "], "--trigger: got ' '; must be a word on one line"),
        (["cats", "--gpu=h100", "--trigger=ink --d 5"], "must be a word on one line, without --"),
        (["cats", "--gpu=h100", "--trigger=#ink"], "must be a word on one line"),
    ],
)
def test_what_is_missing_is_said(
    wrong: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    error: str,
) -> None:
    monkeypatch.chdir(wrong)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("fluxtrain.plan.first_file.missing_gpus", lambda: None)
    assert init(*words) != EXIT_OK
    assert error in capsys.readouterr().err
    assert not (wrong / "cats.yaml").exists()
    assert (wrong / "kept.yaml").read_text() == "mine"


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of what cannot be trained, which stays as it is."""
    here = tmp_path_factory.mktemp("wrong")
    write_pictures(here / "cats")
    write_pictures(here / "tables")
    (here / "tables" / "captions.csv").write_text("file_name,text\n0.png,a cat\n")
    (here / "one").mkdir()
    write_pictures(here / "one" / "target", count=2, captions=2)
    write_pictures(here / "one" / "control", count=1)
    (here / "none").mkdir()
    for name in ("target", "masks"):
        (here / "pairs" / name).mkdir(parents=True)
    (here / "kept.yaml").write_text("mine")
    (here / "job.yaml").write_text("kind: FluxTraining")
    for name in ("t.zip", "t.tar.gz"):
        (here / name).write_bytes(b"x")
    bad = write_pictures(here / "bad", captions=4)
    (bad / "4.png").write_bytes(b"")
    (bad / "5.png").rename(bad / "latin.png")
    (bad / "latin.txt").write_bytes("Käse".encode("latin-1"))
    return here


def test_numbers_in_names_of_folders_are_said_to_be_no_repeats(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "cats").mkdir()
    write_pictures(here / "cats" / "10_ohwx cat", count=2)
    assert init("cats", "--trigger=ohwx", "--gpu=h100") == EXIT_OK
    assert "such as '10_ohwx cat', are no repeats here; set" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["yes", "null", "007", "-d", "it's"])
def test_a_folder_of_any_name_makes_a_file_whose_lines_can_be_copied(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_pictures(here / name, count=1)
    file = f"{name} file.yaml"
    assert init(f"--output={file}", "--trigger=ohwx", "--gpu=mi300x", "--", name) == EXIT_OK
    run = next(line for line in capsys.readouterr().out.splitlines() if "fluxtrain run" in line)
    assert shlex.split(run)[3] == file
    schedule = written(file).schedule
    assert schedule.epochs is not None
    assert schedule.warmup_steps <= schedule.epochs * 10 / 4


TINY = [
    f"--model.in_channels={4 * CHANNELS}",
    "--model.hidden_size=64",
    "--model.num_heads=2",
    "--model.depth=1",
    "--model.depth_single_blocks=1",
    "--model.axes_dim=[8,12,12]",
    f"--model.vec_in_dim={WIDTH}",
    f"--model.context_in_dim={WIDTH}",
    f"--data.text_length={TOKENS}",
    "--data.image_size=64",
    "--data.buckets={step: 16}",
    "--data.num_workers=0",
    "--encoders.precision=float32",
    "--precision.compute=float32",
    "--schedule.epochs=1",
    "--schedule.warmup_steps=0",
    "--sampling.num_steps=1",
    "--sampling.every_steps=0",
    "--adapter.base_dtype=compute",
    "--logging.metrics_port=0",
]


def write_models(folder: Path) -> None:
    """Write a tiny base and its encoders."""
    models = write_encoders(folder)
    weights = save_flux(initialised(tiny_model(guidance_embed=True)), models)
    weights.rename(models / "flux1-dev.safetensors")


@pytest.mark.slow
def test_the_file_runs_with_a_tiny_base(here: Path) -> None:
    write_pictures(here / "cats", captions=6)
    write_models(here)
    words = "--gpu=rx7900xtx", "--models=."
    made = fluxtrain("init", "cats", *words)
    assert made.returncode == EXIT_OK, made.stderr
    assert "fetch  nothing: all weights are in ." in made.stdout
    assert made.stdout.splitlines()[-2] == "  run    fluxtrain run cats.yaml --models ."
    ran = fluxtrain("run", "cats.yaml", "--models=.", "--cpu", *TINY)
    assert ran.returncode == EXIT_OK, ran.stderr
    output = here / "runs/cats"
    assert (output / "adapters/cats.safetensors").exists()
    assert (output / "gallery.html").exists()
    assert "micro batch 4 (found, " in ran.stderr
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 15, "six pictures, ten times, in batches of four"
    words = "--prompt=a cat", "--output=images", "--models=."
    sampled = fluxtrain("sample", "runs/cats", *words, "--sampling.num_steps=1")
    assert sampled.returncode == EXIT_OK, sampled.stderr
    assert (here / "images/samples/0000.png").exists()


@pytest.mark.slow
def test_one_picture_of_any_name_in_any_folder_trains_in_any_locale(here: Path) -> None:
    pictures = write_pictures(here / "Bilder für Öl", count=1)
    (pictures / "0.png").rename(pictures / "日本 ü.png")
    (pictures / "日本 ü.txt").write_text("grün 日本 😀", encoding="utf-8")
    (work := here / "meine Läufe").mkdir()
    write_models(here)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (
        ("init", "../Bilder für Öl", "--gpu=rx7900xtx", "--models=.."),
        ("run", "bilder-fur-ol.yaml", "--models=..", "--cpu", *TINY),
    ):
        environment = os.environ | ascii_only
        done = subprocess.run(command(*words), cwd=work, env=environment, capture_output=True)
        assert done.returncode == EXIT_OK, done.stderr.decode()
    assert (work / "runs/bilder-fur-ol/adapters/bilder-fur-ol.safetensors").exists()


def test_the_model_of_the_demo_learns_pictures_on_a_cpu(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(here / "cats")
    assert init("cats", "--trigger=ohwx", "--base=demo") == EXIT_OK
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("cats.yaml: 6 pictures, 300 steps of 4 on this machine's CPU, ")
    assert said[1].startswith(
        "  fetch  ../runs/openmoji, openmoji/autoencoder.safetensors: `make ru"
    )
    config, job = written("cats.yaml"), load_job(Path("cats.yaml"))
    assert (config.preset, str(config.initial_weights)) == ("openmoji", "../runs/openmoji")
    assert (config.data.image_size, config.data.buckets, config.data.validation) == (64, None, None)
    assert config.parallel.micro_batch_size == "auto"
    assert job.spec.gpus_per_node == 0
    assert main(["fetch", "cats.yaml"]) == EXIT_USAGE
    assert "`make run`, or `fluxtrain prepare openmoji` and a run of" in capsys.readouterr().err


def test_the_command_in_the_file_plans_for_its_own_gpu(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(here / "cats")
    assert init("cats", "--trigger=ohwx", "--gpu=rx7900xtx") == EXIT_OK
    command = (here / "cats.yaml").read_text().split("`")[1]
    capsys.readouterr()
    assert main(command.replace("FILE", "cats.yaml").split()[1:]) == EXIT_OK
    assert "1 × RX 7900 XTX." in capsys.readouterr().out.splitlines()[0]


def cut_off(here: Path) -> bytes:
    Image.effect_noise((96, 64), 64).save(here / "whole.jpg")
    return (here / "whole.jpg").read_bytes()[:900]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bad.png", "no picture in a format that is read"),
        ("cut.jpg", "corrupt or cut off ("),
        ("empty.avif", "the file is empty"),
    ],
)
def test_a_skipped_picture_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    content = {"bad.png": b"no picture", "cut.jpg": cut_off(here), "empty.avif": b""}[name]
    (write_pictures(here / "cats") / name).write_bytes(content)
    assert init("cats", "--trigger=ohwx", "--gpu=h100") == EXIT_OK
    said = capsys.readouterr().out
    assert said.startswith("cats.yaml: 6 pictures, 300 steps of 4 ")
    assert f"  skipped {name}: {reason}" in said
    assert "  1 file is skipped" in said


@pytest.mark.parametrize(
    ("captions", "words", "said", "fields"),
    [
        (["a cat", ""], [], "1 of 2 pictures without a caption: trained on the empty prompt", ()),
        (["a cat", ""], ["ohwx"], "1 of 2 pictures without a caption: trained on 'ohwx'", ("ohwx", "")),
        (["Ohwx, a cat", "", ""], ["ohwx"], "2 of 3 pictures without a caption: trained on 'ohwx'",
         ("", "ohwx")),
        (["ohwx, a cat", "a dog"], ["ohwx"], "1 of 2 captions with 'ohwx' already, which they have twice now",
         ("ohwx", "")),
        (["a party", "a cart"], ["art"], "", ("art", "")),
    ],
)  # fmt: skip
def test_what_is_trained_without_a_caption_or_with_the_trigger_in_it_is_said(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    captions: list[str],
    words: list[str],
    said: str,
    fields: tuple[str, ...],
) -> None:
    folder = write_pictures(here / "cats", count=len(captions))
    for index, caption in enumerate(captions):
        (folder / f"{index}.txt").write_text(caption)
    assert init("cats", "--gpu=h100", *(f"--trigger={word}" for word in words)) == EXIT_OK
    assert said in capsys.readouterr().out
    data = written("cats.yaml").data
    assert (data.caption_prefix, data.class_tokens) == (fields or ("", ""))


@pytest.mark.parametrize(("scale", "size"), [(2, 512), (16, 1024)])
def test_a_check_of_the_folder_has_the_sizes_of_the_file(
    here: Path, capsys: pytest.CaptureFixture[str], scale: int, size: int
) -> None:
    write_pictures(here / "cats", scale=scale)
    assert main(["data", "check", "cats", "--json"]) == EXIT_OK
    checked = json.loads(capsys.readouterr().out)
    assert init("cats", "--trigger=ohwx", "--gpu=h100") == EXIT_OK
    assert (written("cats.yaml").data.image_size, written("cats.yaml").data.buckets) != (size, None)
    capsys.readouterr()
    assert main(["data", "check", "-f", "cats.yaml", "--json"]) == EXIT_OK
    of_file = json.loads(capsys.readouterr().out)
    counts = ("sizes", "samples", "global_batch_size", "steps_per_epoch", "steps")
    assert {key: checked[key] for key in counts} == {key: of_file[key] for key in counts}
    assert len(checked["sizes"]) == 3
    assert not checked["much_cropped"]


@pytest.mark.parametrize("words", [["init", "cats", "--gpu=h100"], ["data", "check", "cats"]])
def test_pictures_are_read_for_their_sizes_and_once_to_decode_them(
    here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    write_pictures(here / "cats", captions=6)
    read = list[Path]()
    monkeypatch.setattr(
        subset, "read_bytes", lambda path: (read.append(path), path.read_bytes())[1]
    )
    assert main(words) == EXIT_OK
    assert len(read) == 2 * len(set(read)) == 12


def test_a_folder_named_as_a_file_is_a_source(here: Path) -> None:
    write_pictures(here / "cats.yaml", captions=6)
    assert init("cats.yaml", "--gpu=h100") == EXIT_OK
    assert str(written("cats-yaml.yaml").data.images) == str(here / "cats.yaml")


def test_a_name_loses_the_marks_of_its_letters(here: Path) -> None:
    write_pictures(here / "Bilder für Öl")
    assert init("Bilder für Öl", "--trigger=ohwx", "--gpu=h100") == EXIT_OK
    assert (here / "bilder-fur-ol.yaml").is_file()


def test_the_file_is_short_and_each_comment_is_beside_its_field(here: Path, large: Path) -> None:
    assert init(str(large), "--trigger=a: #b", "--gpu=rx9070xt") == EXIT_OK
    lines = (here / "cats.yaml").read_text().splitlines()
    assert len(lines) < 45
    assert max(map(len, lines)) < 120 + len(str(large))
    assert "      offload_blocks: 16 # their weights take 3.03 GiB of host memory" in lines
    run = yaml.safe_load("\n".join(lines))["spec"]["run"]
    assert run["data"]["caption_prefix"] == "a: #b"
    assert run["adapter"] == {"rank": 16, "alpha": 16.0, "base_dtype": "fp8"}
