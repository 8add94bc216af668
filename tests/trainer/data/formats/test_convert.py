"""`fluxtrain convert`: every layout becomes every other one exactly, or the target does not appear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer import ranks
from tests.trainer.data.formats.encoded_sets import (
    LAYOUTS,
    assert_reads,
    cell,
    sample,
    save_with_mean,
    write,
)

from fluxtrain.cli import main
from fluxtrain.contract.run.data import Layout
from fluxtrain.data.formats.convert import convert, open_encoded
from fluxtrain.errors import ConfigError, DataError, StorageError


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_becomes_every_other(tmp_path: Path, layout: Layout, to: Layout) -> None:
    source = write(tmp_path / "source", layout)
    assert convert(source, tmp_path / "target", to, shard_size=5) == 23
    dataset = open_encoded(tmp_path / "target", to)
    assert_reads(dataset, list(range(23)))
    assert [dataset.key(i) for i in range(23)] == [f"key-{i}" for i in range(23)]
    assert dataset.timesteps(np.arange(23)).tolist() == [(i * 3) % 8 for i in range(23)]
    assert not (tmp_path / "target.partial").exists()


def test_there_and_back_gives_equal_bytes(tmp_path: Path) -> None:
    first = write(tmp_path / "a", "arrow")
    convert(first, tmp_path / "b", "webdataset", shard_size=9)
    convert(tmp_path / "b", tmp_path / "c", "parquet", shard_size=9)
    convert(tmp_path / "c", tmp_path / "d", "arrow", shard_size=9)
    assert ranks.contents(first) == ranks.contents(tmp_path / "d")


def test_an_unreadable_sample_ends_a_conversion(tmp_path: Path) -> None:
    source = save_with_mean(tmp_path / "source", "arrow", b"")
    with pytest.raises(DataError, match=r"a\.arrow record 1 .*mean: missing"):
        convert(source, tmp_path / "target", "shards")
    assert not (tmp_path / "target").exists()


def test_a_target_that_was_written_wrong_is_not_renamed(tmp_path: Path) -> None:
    source, target = write(tmp_path / "source", "arrow"), tmp_path / "target"
    num_written = 0

    def flip_a_bit(samples: int) -> None:
        nonlocal num_written
        num_written += samples
        if num_written == 23:  # all but the last file exist
            path = target.with_name("target.partial") / "shard_000000.tar"
            content = bytearray(path.read_bytes())
            content[content.index(cell(sample(2).txt)) + 140] ^= 1
            path.write_bytes(content)

    with pytest.raises(StorageError, match="sample 2 differs from what was written"):
        convert(source, target, "webdataset", shard_size=9, advance=flip_a_bit)
    assert not target.exists()


def test_the_command_prints_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "source", "shards"), tmp_path / "target"
    assert main(["convert", str(source), str(target), "--to", "arrow"]) == 0
    expected = f"{target}: 23 samples as arrow, each compared after writing\n"
    assert capsys.readouterr().out == expected
    assert main(["convert", str(source), str(target), "--to", "arrow"]) == 2
    assert "exists already; name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("source", {}, "TARGET: got"),
        ("source/inside", {}, "is inside the source"),
        ("existing", {}, "exists already; name a new folder"),
        ("new", {"layout": "parquet"}, "no *.parquet is here"),
    ],
)
def test_unsuitable_source_and_target_are_refused(
    tmp_path: Path, target: str, options: dict[str, Any], message: str
) -> None:
    source = write(tmp_path / "source", "arrow")
    (tmp_path / "existing").mkdir()
    (tmp_path / "existing" / "file").touch()
    with pytest.raises((ConfigError, DataError)) as error:
        convert(source, tmp_path / target, "shards", **options)
    assert message in str(error.value)
