"""Damaged checkpoints: found before they are used, kept aside, and the run goes on from the one before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.trainer import in_process, ranks
from tests.trainer.outputs import losses

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, StorageError
from fluxtrain.launch.torchrun import finished_state
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.runtime import files
from fluxtrain.state.recovery import Recovery
from fluxtrain.state.run_state import DONE, complete, read_checksums, step_of
from fluxtrain.state.verification import find_damage

SAVED, LAST = 6, 8
ALONE = World(0, 0, 1, ranks.CPU)
MORE_RANKS = [(0, (1, 2)), (0, (2, 1)), (1, (2, 1)), (0, (2, 2)), (1, (2, 3))]
slow = pytest.mark.slow
Damage = Callable[[Path], object]


def config(steps: int, **checkpoints: Any) -> RunConfig:
    return resolve(
        {
            "preset": "micro",
            "schedule": {"steps": steps},
            "checkpoint": {"every_steps": 2, "keep": 3, "memory_every_steps": 0, **checkpoints},
            "evaluation": {"every_samples": 1 << 20, "at_end": False},
            "sampling": {"at_end": False},
            "logging": {"every_steps": 1, "metrics_port": 0},
        }
    )


def paths(output: Path) -> RunPaths:
    return RunPaths(output, output, output)


def train(output: Path, steps: int, size: int = 1, **checkpoints: Any) -> list[int | None]:
    return in_process.finish(
        ranks.train_together, config(steps, **checkpoints), paths(output), size
    )


def text(output: Path) -> str:
    return ranks.output_of(paths(output))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with checkpoints of steps 2, 4 and 6."""
    output = tmp_path_factory.mktemp("saved") / "run"
    assert train(output, SAVED) == [EXIT_OK], text(output)
    return output


@pytest.fixture(scope="module")
def reference(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of that run, continued without damage."""
    output = tmp_path_factory.mktemp("reference") / "run"
    shutil.copytree(saved, output)
    assert train(output, LAST) == [EXIT_OK], text(output)
    assert "damaged" not in text(output)
    return losses(output)


@pytest.fixture
def output(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of that run."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def checkpoint(output: Path) -> Path:
    """Return its newest checkpoint."""
    return folder(output, SAVED)


def folder(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step_{step:010d}"


def shard(checkpoint: Path) -> Path:
    return min(checkpoint.glob("*.safetensors"))


def truncate(checkpoint: Path) -> None:
    content = shard(checkpoint).read_bytes()
    shard(checkpoint).write_bytes(content[:-100])


def lengthen(checkpoint: Path) -> None:
    with shard(checkpoint).open("ab") as file:
        file.write(b"\0")


def flip(checkpoint: Path, offset: float = 0.5, count: int = 1) -> None:
    content = bytearray(shard(checkpoint).read_bytes())
    begin = int(offset * len(content)) if offset < 1 else int(offset)
    for index in range(begin, begin + count):
        content[index] ^= 0x3F
    shard(checkpoint).write_bytes(content)


def write(name: str, content: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).write_text(content)


def change(name: str, **values: Any) -> Damage:
    def apply(checkpoint: Path) -> None:
        path = checkpoint / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


DAMAGES: dict[str, Damage] = {
    "cut": truncate,
    "longer": lengthen,
    "empty": lambda checkpoint: shard(checkpoint).write_bytes(b""),
    "no shard": lambda checkpoint: shard(checkpoint).unlink(),
    "another shard": lambda c: shutil.copy(shard(c), c / "shard-00002.safetensors"),
    "a folder": lambda c: (shard(c).unlink(), (c / shard(folder(c.parents[1], 2)).name).mkdir()),
    "a bit of a tensor": flip,
    "4 KiB": lambda checkpoint: flip(checkpoint, count=4096),
    "the last byte": lambda c: flip(c, shard(c).stat().st_size - 1),
    "the header": lambda checkpoint: flip(checkpoint, offset=100),
    "the header's length": lambda checkpoint: flip(checkpoint, offset=6),
    "no run.json": lambda checkpoint: (checkpoint / "run.json").unlink(),
    "run.json": write("run.json", "{"),
    "a list as run.json": write("run.json", "[]"),
    "step -5": write("run.json", '{"step": -5, "samples": 1}'),
    "another seed": change("config.json", seed=3),
    "config.json": write("config.json", "x"),
    "an empty DONE": write(DONE, ""),
    "DONE": write(DONE, '{"files": {"../run.json": {}}}'),
    "a path in DONE": write(DONE, '{"block_bytes": 1, "files": {"/etc/passwd": {}}}'),
    "blocks in DONE": write(DONE, '{"block_bytes": 0, "files": {"a": {"size": 1, "crc32": []}}}'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_every_damage_is_found(checkpoint: Path, damage: Damage) -> None:
    assert find_damage(checkpoint, ALONE, lambda: None) == ""
    damage(checkpoint)
    found = find_damage(checkpoint, ALONE, lambda: None)
    assert found
    assert "\n" not in found
    assert len(found) < 400


def take_over(config: RunConfig, paths: RunPaths, world: World, *, is_shared: bool) -> None:
    """Begin a run on two nodes of one rank, in a folder of both or of each."""
    with process_group() as joined:
        output = paths.output if is_shared else paths.output / f"node {joined.rank}"
        Recovery(config, replace(paths, output=output), joined, lambda: None)


@pytest.mark.parametrize("is_shared", [False, True])
def test_nodes_without_a_folder_in_common_are_named(tmp_path: Path, is_shared: bool) -> None:
    """Each pod without a volume has an output of its own, with its part of each checkpoint."""
    paths = RunPaths(tmp_path / "out", tmp_path, tmp_path)
    run = partial(take_over, is_shared=is_shared)
    assert ranks.finish(run, config(1), paths, 2) == [EXIT_OK] * 2
    first, second = (ranks.output_of(paths, rank) for rank in range(2))
    assert ("is not the same on all nodes" in first) != is_shared
    assert "not the same" not in second


def tell_damages(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Print what each rank finds wrong with the checkpoints in the data folder."""
    with process_group() as joined:
        for checkpoint in sorted(paths.data.glob("*/step_*")):
            found = find_damage(checkpoint, joined, lambda: None)
            print(json.dumps([checkpoint.parent.name, found]))


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_find_what_one_finds(saved: Path, tmp_path: Path, size: int) -> None:
    expected, name = list[list[str]](), folder(tmp_path, 6).name
    damages: list[Damage] = [lambda checkpoint: None, *DAMAGES.values()]
    for number, damage in enumerate(damages):
        run = tmp_path / f"{number:02d}" / "checkpoints"
        for step in (2, 6):
            shutil.copytree(folder(saved, step), run / folder(saved, step).name)
        damage(run / name)
        shutil.rmtree(run / folder(saved, 2).name)
        (run / name).rename(tmp_path / f"{number:02d}" / name)
        found = find_damage(tmp_path / f"{number:02d}" / name, ALONE, lambda: None)
        expected.append([f"{number:02d}", found])
    assert [found for _, found in expected].count("") == 1
    output = RunPaths(tmp_path / "out", tmp_path, tmp_path)
    assert ranks.finish(tell_damages, config(1), output, size) == [EXIT_OK] * size
    for rank in range(size):
        told = [json.loads(line) for line in ranks.output_of(output, rank).splitlines()]
        assert told == expected


def test_checksums_of_blocks_of_another_size_are_verified(checkpoint: Path) -> None:
    names = read_checksums(checkpoint)
    sums = {name: files.sums_of((checkpoint / name).read_bytes(), 1 << 10) for name in names}
    (checkpoint / DONE).write_text(files.encode(sums))
    assert find_damage(checkpoint, ALONE, lambda: None) == ""
    flip(checkpoint)
    assert "wrong checksum" in find_damage(checkpoint, ALONE, lambda: None)


def test_storage_that_cannot_be_read_now_damages_nothing(checkpoint: Path) -> None:
    name = shard(checkpoint).name
    shard(checkpoint).unlink()
    (checkpoint / name).symlink_to(name)  # ELOOP, even for root
    with pytest.raises(StorageError, match="cannot be read"):
        find_damage(checkpoint, ALONE, lambda: None)


def test_a_finished_run_with_a_damaged_state_is_done_again_from_the_one_before(
    output: Path,
) -> None:
    before = losses(output)
    assert finished_state(config(SAVED), output) is not None
    write("run.json", "{")(folder(output, 6))
    assert finished_state(config(SAVED), output) is None
    assert train(output, SAVED) == [EXIT_OK], text(output)
    assert finished_state(config(SAVED), output) is not None
    assert losses(output) == before


@pytest.mark.parametrize("name", ["cut", "4 KiB", "run.json", "another seed", "an empty DONE"])
def test_the_one_before_is_used_and_the_damaged_one_kept(
    output: Path, reference: dict[int, float], name: str
) -> None:
    DAMAGES[name](folder(output, 6))
    assert train(output, LAST) == [EXIT_OK], text(output)
    (line,) = [line for line in text(output).splitlines() if "damaged" in line]
    assert "step_0000000006: damaged (" in line
    assert line.endswith("step_0000000004 is used instead")
    assert losses(output) == reference
    assert [step_of(found) for found in complete(output / "checkpoints")] == [4, 6, 8]
    (aside,) = (output / "checkpoints").glob("damaged_*_step_0000000006")
    assert aside.name in line
    assert (aside / DONE).exists()
    assert train(output, LAST + 1) == [EXIT_OK]
    assert "damaged" not in text(output)


@pytest.mark.parametrize(
    ("number", "sizes"),
    [(1, (2, 2)), *(pytest.param(*case, marks=pytest.mark.proof) for case in MORE_RANKS)],
)
def test_ranks_agree_on_the_one_before(
    reference: dict[int, float], tmp_path: Path, number: int, sizes: tuple[int, int]
) -> None:
    """Either shard is damaged; some rank other than 0 finds it."""
    output, (before, after) = tmp_path / "run", sizes
    assert train(output, SAVED, before) == [EXIT_OK] * before, text(output)
    shards = sorted(folder(output, 6).glob("*.safetensors"))
    content = bytearray(shards[number % before].read_bytes())
    content[-1] ^= 1
    shards[number % before].write_bytes(content)
    assert train(output, LAST, after) == [EXIT_OK] * after, text(output)
    assert text(output).count("step_0000000004 is used instead") == 1
    assert losses(output) == pytest.approx(reference, rel=1e-4)


def test_the_newest_two_are_damaged(output: Path, reference: dict[int, float]) -> None:
    flip(folder(output, 6))
    truncate(folder(output, 4))
    assert train(output, LAST) == [EXIT_OK], text(output)
    assert text(output).count("step_0000000002 is used instead") == 2
    assert losses(output) == reference


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=slow)])
def test_a_run_whose_checkpoints_are_all_damaged_never_starts_from_zero(
    output: Path, size: int
) -> None:
    for step in (2, 4, 6):
        flip(folder(output, step))
    before = losses(output)
    for _ in range(2):  # the same command again changes nothing
        assert train(output, LAST, size) == [EXIT_USAGE] * size, text(output)
        assert "Traceback" not in text(output)
        assert "no checkpoint is left, as damaged_" in text(output)
        assert "start from step 0" in text(output)
    assert losses(output) == before
    for aside in (output / "checkpoints").glob("damaged_*"):
        shutil.rmtree(aside)
    assert train(output, LAST, size) == [EXIT_OK] * size, text(output)


def test_an_incomplete_newest_one_is_ignored_and_written_again(
    output: Path, reference: dict[int, float]
) -> None:
    (folder(output, 6) / DONE).unlink()
    (output / "checkpoints" / "partial_000001_step_0000000006").mkdir()
    shutil.copytree(folder(output, 4), output / "checkpoints" / "removed_0_step_0000000004")
    assert train(output, LAST) == [EXIT_OK], text(output)
    assert "damaged" not in text(output)
    assert losses(output) == reference
    assert [step_of(found) for found in complete(output / "checkpoints")] == [4, 6, 8]


def test_the_config_of_another_run_is_refused_and_nothing_renamed(output: Path) -> None:
    flip(folder(output, 6))
    other = config(LAST).model_copy(update={"seed": 5})
    assert in_process.finish(ranks.train_alone, other, paths(output)) == [EXIT_USAGE]
    assert [step_of(found) for found in complete(output / "checkpoints")] == [2, 4, 6]
