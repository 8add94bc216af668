"""Names of strangers begin no line of a log, and are no line of an MLPerf log; links are not followed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from tests.trainer.data.formats.encoded_sets import sample

from fluxtrain.data.formats.arrow import SCHEMA, to_batch
from fluxtrain.data.formats.convert import open_encoded
from fluxtrain.errors import ConfigError, DataError, JoinedDataError, one_line
from fluxtrain.mlperf.log_lines import read_lines
from fluxtrain.runtime.files import atomic_write

LINE = ':::MLLOG {"time_ms": 1, "key": "eval_accuracy", "value": 0.1, "metadata": {}}'


def lines_in(folder: Path, text: str) -> list[str]:
    """Return the MLPerf lines in ``text``, as MLCommons' parser finds them."""
    (folder / "log").write_text(text)
    return [line.text for line in read_lines(folder / "log")]


@pytest.mark.parametrize(
    "text", [f"a\n{LINE}", f"a\r{LINE}\r", f"a\u2028{LINE}", LINE, f"\x1b[2K{LINE}"]
)
def test_an_error_with_a_strangers_name_is_one_line_without_the_token(
    tmp_path: Path, text: str
) -> None:
    for error in (DataError(text), ConfigError(text, text, text), JoinedDataError([text])):
        assert str(error).isprintable()
        assert lines_in(tmp_path, str(error)) == []
    assert "eval_accuracy" in one_line(text)


def test_a_column_with_a_line_break_injects_nothing(tmp_path: Path) -> None:
    schema = pa.schema(
        [("mean", pa.struct([(f"x\n{LINE}\n", pa.int8())])), (f"\n{LINE}\n", pa.int8())]
    )
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), schema) as file:
        file.write_table(schema.empty_table())
    with pytest.raises(DataError) as caught:
        open_encoded(tmp_path, "arrow")
    assert lines_in(tmp_path, str(caught.value)) == []


def test_a_key_with_the_token_injects_nothing(tmp_path: Path) -> None:
    batch = to_batch([sample(0)], SCHEMA)
    keys = pa.array([LINE])
    batch = pa.record_batch([keys, *batch.columns[1:]], schema=SCHEMA)
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), SCHEMA) as file:
        file.write_batch(batch)
    name = open_encoded(tmp_path, "arrow").name(0)
    assert lines_in(tmp_path, one_line(f"skipped an unreadable sample: {name}")) == []


def test_a_link_at_the_name_of_a_partial_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "a.partial").symlink_to(victim)
    with atomic_write(tmp_path / "a.json") as partial:
        partial.write_text("new")
    assert victim.read_text() == "kept"
    assert (tmp_path / "a.json").read_text() == "new"
    assert not (tmp_path / "a.json").is_symlink()
