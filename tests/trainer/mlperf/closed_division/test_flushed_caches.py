"""``cache_clear`` is true only if every node of the run has emptied its page cache, and says when."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from cluster.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.mlperf.small_logs import benchmark, open_log

from fluxtrain.contract.process import ENV_FLUSHED, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.mlperf.evidence import Run
from fluxtrain.mlperf.facts import all_flushed, flushed
from fluxtrain.mlperf.log_lines import read_lines
from fluxtrain.mlperf.review.review import rule_findings
from fluxtrain.parallel.distributed import World, process_group


def tell(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Write whether all of two nodes have flushed, as this rank sees it."""
    ranks.set_environment(world, port)
    with process_group() as joined:
        environment = {ENV_FLUSHED: str(paths.data / f"node_{joined.rank}")}
        found = all_flushed(World(joined.rank, 0, joined.size, joined.device), environment)
        (paths.output / f"told_{joined.rank}").write_text(repr(found))


@pytest.mark.parametrize(
    ("texts", "found"),
    [(["1000", "1007"], "1007.0"), (["1000", None], "None"), (["1000", ""], "None")],
)
def test_all_nodes_must_have_flushed(tmp_path: Path, texts: list[str | None], found: str) -> None:
    for number, text in enumerate(texts):
        if text is not None:
            (tmp_path / f"node_{number}").write_text(text)
    paths = RunPaths(tmp_path / "output", tmp_path, tmp_path)
    run = partial(tell, port=free_port())
    assert ranks.finish(run, resolve({"preset": "micro"}), paths, 2) == [0, 0]
    assert [(paths.output / f"told_{rank}").read_text() for rank in range(2)] == [found, found]


def test_a_laptop_has_flushed_nothing() -> None:
    assert flushed({}) is None
    assert all_flushed(World.alone(), {}) is None


@pytest.mark.parametrize(
    ("time", "value", "first"),
    [(None, False, "cache_clear"), (1e9 - 9, True, "cache_clear"), (1e9 + 2, True, "init_start")],
)
def test_the_log_says_what_happened(
    tmp_path: Path, time: float | None, value: bool, first: str
) -> None:
    open_log(tmp_path / "log", benchmark(), flushed=time).close()
    lines = list(read_lines(tmp_path / "log"))
    (clear,) = [line for line in lines if line.key == "cache_clear"]
    assert (clear.value, lines[0].key) == (value, first)
    assert clear.fields["time_ms"] == int(1000 * (time or 1e9))
    found = {each.rule for each in rule_findings(Run("run", tmp_path / "log", lines))}
    assert ("caches-are-flushed" in found) == (not value)
