"""Runs of the closed division: what they refuse, and how they flush caches."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.mlperf.good_run import good_run
from tests.trainer.mlperf.small_logs import benchmark, open_log
from tests.trainer.outputs import mlperf_values
from tests.trainer.small_runs import ENCODED_RUN, SHARD_SIZE, as_closed, merge_all, write_encoded

from fluxtrain.cli import main
from fluxtrain.contract.process import ENV_FLUSHED, RunPaths
from fluxtrain.contract.run.closed_division import Violation, begins_closed, violations
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_USAGE, ConfigError
from fluxtrain.mlperf.evidence import Run
from fluxtrain.mlperf.facts import all_flushed, flushed, node_mark
from fluxtrain.mlperf.log_lines import read_lines
from fluxtrain.mlperf.review.review import rule_findings
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.runtime.safetensors import read_header

AUTO = {"logging": {"mlperf": {"division": "auto"}}}
RULE = Violation("6.6", "2 of 512 training samples could not be read")
KEY = "fluxtrain_division"


def values(path: Path, key: str) -> list[Any]:
    return [line.value for line in read_lines(path) if line.key == key]


BROKEN: list[tuple[dict[str, Any], tuple[int, int], list[str]]] = [
    ({}, (8, 8), []),
    ({}, (4, 8), ["2.2"]),
    ({"seed": 1234}, (1, 1), ["5.1"]),
    ({"data": {"order": "shuffled"}}, (1, 1), ["6.6"]),
    ({"data": {"source": "synthetic", "text_length": 512}}, (1, 1), ["6.3", "6.1"]),
    ({"evaluation": {"at_end": True}, "optim": {"beta1": 0.5}}, (2, 3), ["9.1", "9.4", "2.2"]),
    ({"model": {"depth": 18}, "encoders": {"latent_scale": 0.3}}, (1, 1), ["6.2", "8.1"]),
    ({"preset": "micro"}, (1, 1), ["8"]),
]


@pytest.mark.parametrize(("changes", "num_nodes", "sections"), BROKEN)
def test_auto_is_closed_unless_a_rule_is_broken(
    tmp_path: Path, changes: dict[str, Any], num_nodes: tuple[int, int], sections: list[str]
) -> None:
    config = benchmark(**{**AUTO, **changes})
    found = [each.section for each in violations(config, num_nodes)]
    assert found[: len(sections)] == sections
    assert begins_closed(config, num_nodes) == (not sections)
    log = tmp_path / "mlperf.log"
    open_log(log, config, num_nodes=num_nodes).close()
    assert values(log, "submission_division") == ["open" if sections else "closed"]
    told = [rule for value in values(log, KEY) for rule in value["rules"]]
    assert [rule.rpartition(" (")[2] for rule in told] == [f"training rules {s})" for s in found]


@pytest.mark.parametrize("division", ["closed", "open"])
def test_a_stated_division_is_no_matter_of_rules(tmp_path: Path, division: str) -> None:
    open_log(tmp_path / "log", benchmark(logging={"mlperf": {"division": division}})).close()
    assert values(tmp_path / "log", "submission_division") == [division]
    assert values(tmp_path / "log", KEY) == []


def test_an_auto_run_that_breaks_a_rule_is_open_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    log = open_log(path, benchmark(**AUTO))
    log.ready()
    log.eval_accuracy(512, 0.9)
    assert [log.rule_broken(RULE, 1024), log.rule_broken(RULE, 1536)] == [True, False]
    log.eval_accuracy(2048, 0.8)
    log.close()
    log = open_log(path, benchmark(**AUTO), samples=2048)  # stays open over a restart
    assert not log.rule_broken(RULE, 2560)
    log.eval_accuracy(4096, 0.7)
    log.close()
    assert values(path, KEY) == [{"division": "open", "rules": [f"{RULE}"]}]
    assert values(path, "averaged_validation_loss") == [0.8, 0.7]


def test_the_review_names_the_broken_rule(tmp_path: Path) -> None:
    run = good_run(tmp_path, **AUTO)
    assert run.one("submission_division")["value"] == "closed"
    assert not list(rule_findings(run.run()))
    value = {"division": "open", "rules": [str(RULE)]}
    run.events.insert(run.at("run_stop"), {**run.one("run_stop"), "key": KEY, "value": value})
    texts = [each.text for each in rule_findings(run.run()) if each.rule == "stays-closed"]
    assert len(texts) == 1
    assert str(RULE) in texts[0]


@pytest.mark.parametrize(
    ("now", "text"),
    [
        ({"num_ranks": 16, "node_marks": ("a", "b")}, "resumed on 16 ranks, before it had 8"),
        ({"node_marks": ("a", "c")}, "resumed on other nodes"),
    ],
)
def test_a_resume_elsewhere_ends_a_closed_run_and_opens_an_auto_run(
    tmp_path: Path, now: dict[str, Any], text: str
) -> None:
    before = {"node_marks": ("a", "b")}
    for name, config in (("closed", benchmark()), ("auto", benchmark(**AUTO))):
        log = open_log(tmp_path / name, config, **before)
        log.ready()
        log.close()
    with pytest.raises(ConfigError, match=rf"{text} \(training rules 2.2\)"):
        open_log(tmp_path / "closed", benchmark(), samples=512, **now)
    assert values(tmp_path / "closed", "run_resumed") == []
    open_log(tmp_path / "auto", benchmark(**AUTO), samples=512, **now).close()
    assert values(tmp_path / "auto", "run_resumed")[0]["same_nodes"] == (
        now["node_marks"] == ("a", "b")
    )
    assert text in values(tmp_path / "auto", KEY)[0]["rules"][0]


def test_a_resume_on_the_same_nodes_stays_closed_and_is_told(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log", benchmark(), node_marks=("a", "b"))
    log.ready()
    log.close()
    open_log(tmp_path / "log", benchmark(), samples=512, node_marks=("a", "b")).close()
    (told,) = values(tmp_path / "log", "run_resumed")
    assert (told["num_ranks"], told["nodes"], told["same_nodes"]) == (8, ["a", "b"], True)
    log = tmp_path / "log"
    found = rule_findings(Run("run", log, list(read_lines(log))))
    texts = [each.text for each in found if each.rule == "not-resumed"]
    assert "resumed after 512 samples on the same nodes" in texts[0]
    assert values(tmp_path / "log", KEY) == []


def test_a_node_has_a_mark_until_it_is_rebooted(tmp_path: Path) -> None:
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    marks = []
    for text in ("one\n", "one\n", "two\n"):
        boot.write_text(text)
        marks.append(node_mark(tmp_path))
    assert marks[0] == marks[1] != marks[2]


@pytest.mark.parametrize("division", ["closed", "open"])
def test_one_unreadable_training_sample_ends_a_closed_run(tmp_path: Path, division: str) -> None:
    write_encoded(tmp_path)
    path = tmp_path / "train" / "shard_000000.safetensors"
    span = read_header(path)["mean"]
    with path.open("r+b") as file:
        file.seek(span.offset + 3 % SHARD_SIZE * span.row_bytes)
        file.write(b"\xff" * 4)
    config = resolve(merge_all(ENCODED_RUN, {"data": {"order": "sequential"}}))
    config = as_closed(config) if division == "closed" else config
    paths = RunPaths(tmp_path / "output", tmp_path, tmp_path)
    code = EXIT_USAGE if division == "closed" else 0
    assert ranks.finish(ranks.train_alone, config, paths) == [code], ranks.output_of(paths)
    told = [rule for value in mlperf_values(paths.output, KEY) for rule in value["rules"]]
    assert [rule for rule in told if "key3" in rule and "(training rules 6.6)" in rule] == told
    assert len(told) == (division == "closed")


def test_elastic_nodes_are_refused_in_the_closed_division(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    spec = {"nodes": {"min": 2, "max": 4}, "run": {"preset": "mlperf-schnell"}}
    kind = {"apiVersion": "fluxtrain.dev/v1alpha1", "kind": "FluxTraining"}
    file.write_text(json.dumps({**kind, "metadata": {"name": "job"}, "spec": spec}))
    assert main(["plan", str(file)]) == EXIT_USAGE
    assert "spec.nodes.min: got 2; must be nodes.max" in capsys.readouterr().err
    nodes = ["--nodes=2:4", "--rendezvous=localhost:29500", f"--output={tmp_path}"]
    spec["nodes"] = {"min": 4, "max": 4}
    file.write_text(json.dumps({**kind, "metadata": {"name": "job"}, "spec": spec}))
    assert main(["run", str(file), *nodes]) == EXIT_USAGE
    assert "--nodes: got '2:4'; the closed division needs a fixed" in capsys.readouterr().err


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
