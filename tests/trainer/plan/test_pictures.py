"""The plan of a run on pictures: what its encoding and its epochs are, as `data check` finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.trainer.picture_cache.folders import RUN, config, write_pictures

from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.resolve import merge
from fluxtrain.data.pictures.subset import list_subsets
from fluxtrain.picture_cache.check import check_run, run_pictures
from fluxtrain.plan import pictures as module
from fluxtrain.plan.pictures import plan_pictures

COUNT = 7
VARIANTS = {"flip": True, "crops": 3, "captions": 4, "shuffle_caption": True}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a data root with pictures of several sizes, one of which is none."""
    folder = write_pictures(tmp_path / "data/pictures", COUNT)
    (folder / "none.png").write_bytes(b"no picture")
    return tmp_path / "data"


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"repeats": 3, "variants": VARIANTS}, "schedule": {"steps": 1, "epochs": 3}},
        {
            "data": {"variants": VARIANTS, "buckets": {"step": 16, "min_side": 16}},
            "schedule": {"steps": 1, "epochs": 2},
        },
        {"data": {"validation_split": 0.3}, "evaluation": {"at_end": True}},
        {"data": {"images": "set.json", "variants": VARIANTS}},
    ],
    ids=["variants", "buckets", "held out", "kohya"],
)
def test_it_counts_what_a_check_that_decodes_counts(root: Path, changes: dict[str, Any]) -> None:
    sets = [{"image_dir": "pictures", "num_repeats": 2}, {"image_dir": "pictures", "is_reg": True}]
    (root / "set.json").write_text(json.dumps({"datasets": [{"subsets": sets}]}))
    run = config(**changes)
    found = plan_pictures(run, root)
    assert found is not None
    assert found.counted is not None, found.unknown
    with run_pictures(run, RunPaths(root.parent / "out", root, root)) as pictures:
        check = check_run(run, *pictures)
    counted = found.counted
    assert counted.pictures == len(check.inspection.used)
    assert counted.left_out == len(check.inspection.skipped) > 0
    assert (counted.latents, counted.captions) == (check.latents, check.captions)
    assert counted.cache_bytes == check.cache_bytes <= COUNT * found.bytes_per_picture * 2
    assert counted.samples == sum(check.samples.values())
    assert (counted.steps_per_epoch, found.steps) == (check.steps_per_epoch, check.steps)
    assert counted.held_out == check.held_out


def job(root: Path, **data: Any) -> list[str]:
    path = root.parent / "job.yaml"
    run = merge(RUN, {"data": {"validation": "none", **data}, "schedule": {"epochs": 5}})
    head = {"apiVersion": "fluxtrain.dev/v1alpha1", "kind": "FluxTraining"}
    job = {**head, "metadata": {"name": "j"}, "spec": {"run": run}}
    path.write_text(yaml.safe_dump(job))
    return ["plan", str(path), "--data", str(root)]


def test_the_table_says_what_is_encoded_and_how_long_the_epochs_are(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*job(root, variants=VARIANTS), "--gpu", "MI300X"]) == 0
    said = capsys.readouterr().out
    lines = {line.split("  ")[1]: line for line in said.splitlines() if line.startswith("  ")}
    assert lines["pictures"].split()[1:] == ["7", "1", "files", "are", "left", "out"]
    assert lines["samples of an epoch"].endswith("1.75 steps of 4")
    assert lines["cache of one"].endswith("at most 6 × latents and 4 × captions")
    assert "9 steps at most" in lines["training"]  # 35 samples in steps of 4


@pytest.mark.parametrize(
    ("images", "why"),
    [
        (
            "s3://bucket/pictures",
            "they are at a URL, in shards or in Parquet files; fluxtrain data check",
        ),
        ("nothing", "nothing: missing; it should hold pictures"),
        ("no.toml", "no.toml: cannot be read"),
        ("pictures/none.png", "none.png: is one picture; name its folder"),
    ],
)
def test_what_is_not_here_is_unknown_and_nothing_is_asked_for(
    root: Path, capsys: pytest.CaptureFixture[str], images: str, why: str
) -> None:
    assert main([*job(root, images=images, variants=VARIANTS), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["pictures"]["counted"] is None
    assert why in plan["pictures"]["unknown"]
    assert (plan["steps"], plan["pictures"]["latents_per_picture"]) == (None, 6)
    assert main(job(root, images=images)) == 0
    said = capsys.readouterr().out
    assert why in said
    assert "fluxtrain data check -f tells" in said


def test_a_large_set_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config()
    size = sum(p.size for _, listing in list_subsets(run.data, root) for p in listing.pictures)
    monkeypatch.setattr(module, "MAX_BYTES", size - 1)
    found = plan_pictures(run, root)
    assert found is not None
    assert found.counted is None
    assert str(found.unknown).startswith("8 of ")
    assert plan_pictures(config(data={"images": None, "source": "synthetic"}), root) is None
