"""``fluxtrain data check`` on every source of pictures says what the run then does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.contract.bad_specs import GOOD, changed
from tests.trainer.cli.bad_inputs.bad_pictures import parquet, tar
from tests.trainer.fetch.conftest import point_at
from tests.trainer.fetch.servers import FileServer
from tests.trainer.picture_cache.folders import RUN, cache, config, file_of, noise, write_pictures
from tests.trainer.tiny_encoders import SIDE, write_encoders

from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import merge
from fluxtrain.data.loader import training_order
from fluxtrain.errors import FluxtrainError
from fluxtrain.parallel.distributed import World

pytestmark = pytest.mark.slow

COUNT = 7


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoders(tmp_path_factory.mktemp("models"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a data root with pictures, one of which is damaged, and their masks."""
    root = tmp_path / "data"
    folder = write_pictures(root / "pictures", COUNT)
    masks = root / "masks"
    masks.mkdir()
    for number, path in enumerate(sorted(folder.glob("*[pg]"))):
        mask = noise(SIDE + int(path.stem), 2 * SIDE, "L")
        mask = mask if number else mask.point(lambda value: 0)
        (masks / f"{path.stem}.png").write_bytes(file_of(mask, "PNG"))
    (folder / "damaged.png").write_bytes((folder / "000.png").read_bytes()[:300])
    return root


def job(root: Path, **changes: Any) -> Path:
    path = root.parent / "job.yaml"
    run = merge(merge(RUN, {"data": {"validation": "none"}}), changes)
    path.write_text(yaml.safe_dump(changed(GOOD, "spec.run", run)))
    return path


def checked(root: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[int, Any]:
    """Return the exit code of a check of RUN with ``changes``, and what it prints as JSON."""
    sheet = str(root.parent / "sheet.png")
    options = ["--data", str(root), "--contact-sheet", sheet, "--json"]
    code = main(["data", "check", "-f", str(job(root, **changes)), *options])
    return code, json.loads(capsys.readouterr().out)


def tar_of(folder: Path) -> bytes:
    return tar(**{path.name: path.read_bytes() for path in sorted(folder.iterdir())})


def table_of(folder: Path) -> bytes:
    paths = sorted(folder.glob("*[pg]"))
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    return parquet(image=images, text=["a text"] * len(images))


def as_in_the_run(root: Path, models: Path, found: Any, **changes: Any) -> None:
    """Assert that the run of RUN with ``changes`` has the samples and the faults that were found."""
    paths, run = RunPaths(root.parent / "out", root, models), config(**changes)
    work = cache(run, paths, World.alone())
    dataset = work.open(run, paths.output)[0]
    assert len(dataset) == found["samples"]
    assert len(work.missing_texts) == found["captions"]
    assert len(list((paths.output / "cache/latents").glob("[!.]*"))) == found["latents"]
    assert json.loads((paths.output / "pictures.json").read_text())["skipped"] == found["skipped"]
    sizes = {(w * 8, h * 8) for h, w in dataset.latent_sizes.tolist()}
    assert sizes == {(each["width"], each["height"]) for each in found["sizes"]}
    if run.schedule.epochs:
        assert training_order(run, dataset).batches(run.schedule.epochs) == found["steps"]


VARIANTS = {"flip": True, "crops": 2, "captions": 3, "shuffle_caption": True}
CONFIG = {
    "general": {"caption_prefix": "ohwx,"},
    "datasets": [
        {"subsets": [{"image_dir": "pictures", "num_repeats": 3}]},
        {"subsets": [{"image_dir": "others", "is_reg": True, "class_tokens": "a toy"}]},
    ],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"repeats": 2}},
        {"data": {"masks": "masks", "max_skipped": 0.3}},
        {"data": {"variants": VARIANTS}},
        {"data": {"buckets": {"step": 16, "min_side": 16}}, "schedule": {"steps": 1, "epochs": 3}},
        {"data": {"images": "set.json"}},
        {"data": {"images": "shards"}},
        {"data": {"images": "tables"}},
    ],
    ids=["repeats", "masks", "variants", "buckets", "kohya", "shards", "tables"],
)
def test_it_finds_what_the_run_finds(
    data: Path, models: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    write_pictures(data / "others", 3)
    (data / "set.json").write_text(json.dumps(CONFIG))
    (data / "shards").mkdir()
    (data / "shards/s-0.tar").write_bytes(tar_of(data / "pictures"))
    (data / "tables").mkdir()
    (data / "tables/train.parquet").write_bytes(table_of(data / "pictures"))
    code, found = checked(data, capsys, **changes)
    assert code == 0
    assert any(name.endswith(("damaged.png", "/00000007.png")) for name in found["skipped"])
    as_in_the_run(data, models, found, **changes)
    assert (data.parent / "sheet.png").exists()


@pytest.mark.parametrize("url", ["s3://bucket/set", "hf://datasets/owner/set", "WEB/set.tar"])
def test_a_url_is_fetched_once_for_the_check_and_the_run(
    data: Path,
    models: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    url: str,
) -> None:
    server = FileServer({"web/set.tar": tar_of(data / "pictures")})
    point_at(server, monkeypatch)
    for path in (data / "pictures").iterdir():
        for prefix in ("bucket/set", "datasets/owner/set"):
            server.files[f"{prefix}/{path.name}"] = path.read_bytes()
    images = url.replace("WEB", f"{server.url}/web")
    changes = {"data": {"images": images, "download": {"folder": str(data.parent / "node")}}}
    code, found = checked(data, capsys, **changes)
    assert (code, found["samples"]) == (0, COUNT)
    (fetched,) = (data.parent / "node/entries").iterdir()
    before = (fetched / "data").stat().st_ino
    as_in_the_run(data, models, found, **changes)
    assert [path.name for path in fetched.parent.iterdir()] == [fetched.name]
    assert (fetched / "data").stat().st_ino == before
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"images": "nothing"}},
        {"data": {"images": "broken.toml"}},
        {"data": {"masks": "nothing"}},
    ],
    ids=["missing", "toml", "masks"],
)
def test_it_fails_as_the_run_does(
    data: Path, models: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    (data / "broken.toml").write_text("[[datasets]\n")
    code, found = checked(data, capsys, **changes)
    with pytest.raises(FluxtrainError) as error:
        cache(config(**changes), RunPaths(data.parent / "out", data, models), World.alone())
    assert (code, found) == (1, {"error": str(error.value)})


def test_buckets_that_hold_fewer_than_a_batch_are_named(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "pictures/wide.png").write_bytes(file_of(noise(2 * SIDE, SIDE), "PNG"))
    options = [f"--image-size={SIDE}", "--data.buckets={step: 16, min_side: 16, max_side: 128}"]
    options += ["--data.repeats=1", "--schedule.global_batch_size=8"]
    sheet = f"--contact-sheet={data.parent / 'sheet.png'}"
    assert main(["data", "check", str(data / "pictures"), *options, sheet]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if " buckets, " in line)
    assert lines[start].endswith("with fewer samples than a batch of 8:")
    assert any(line.endswith(": 1 sample, one of 1") for line in lines[start:])
