"""Every way to change a run's log, its chain or its files is found, and named."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.mlperf.chain.chained_run import ChainedRun, chained_run

from fluxtrain.cli import main
from fluxtrain.mlperf.chain import digest
from fluxtrain.mlperf.chain_verify import Head

Forgery = Callable[[ChainedRun], object]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> ChainedRun:
    return chained_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(original: ChainedRun, tmp_path: Path) -> ChainedRun:
    shutil.copytree(original.folder, tmp_path, dirs_exist_ok=True)
    return ChainedRun(tmp_path, list(original.heads or ()))


def edit(key: str, old: str, new: str) -> Forgery:
    """Replace text in the log's last line with ``key``."""

    def forge(run: ChainedRun) -> None:
        lines = run.lines
        at = max(n for n, line in enumerate(lines) if f'"key": "{key}"' in line)
        assert old in lines[at]
        lines[at] = lines[at].replace(old, new)
        run.write_lines(lines)

    return forge


def lines(change: Callable[[list[str]], object]) -> Forgery:
    """Change the list of the log's lines."""

    def forge(run: ChainedRun) -> None:
        texts = run.lines
        change(texts)
        run.write_lines(texts)

    return forge


def records(change: Callable[[list[bytes]], object]) -> Forgery:
    """Change the list of the chain's lines, and no hash."""

    def forge(run: ChainedRun) -> None:
        found = run.records
        change(found)
        run.write_records(found)

    return forge


def test_a_run_without_its_configuration_is_refused(
    run: ChainedRun, mlperf: Callable[..., str]
) -> None:
    (run.folder / "config.json").unlink()
    assert "has no config.json" in mlperf(2, "verify", run.folder)


def test_a_pipe_is_refused_and_not_waited_for(run: ChainedRun, mlperf: Callable[..., str]) -> None:
    for name in ("mlperf.log", "mlperf.chain.jsonl", "config.json"):
        path = run.folder / name
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        assert "is not a regular file" in mlperf(2, "verify", run.folder)
        path.unlink()
        path.write_bytes(content)


def swap(items: list[Any], one: int, other: int) -> None:
    items[one], items[other] = items[other], items[one]


def rewritten(run: ChainedRun) -> None:
    """A better loss, earlier, in the log, and the whole chain computed anew."""
    run.write_lines([line.replace('"value": 0.7,', '"value": 0.5,') for line in run.lines])

    def change(values: list[dict[str, Any]]) -> None:
        for value in values:
            if "text" in value:
                value["text"] = value["text"].replace('"value": 0.7,', '"value": 0.5,')

    run.rechain(change)


def rewritten_tail(run: ChainedRun) -> None:
    """The last evaluation and all after it removed from the log and from the chain."""
    run.write_lines(run.lines[:-3])
    run.write_records(run.records[:-5])


def of_another(run: ChainedRun) -> None:
    other = chained_run(run.folder / "other")
    run.chain.write_bytes(other.chain.read_bytes())


def merged(run: ChainedRun) -> None:
    other = chained_run(run.folder / "other")
    run.write_records([*run.records, *other.records])


def other_attempts(run: ChainedRun) -> None:
    """The records of the second attempt before those of the first."""
    at = run.record("resume")
    found = run.records
    run.write_records([*found[at:], *found[:at]])


def other_config(run: ChainedRun) -> None:
    path = run.folder / "config.json"
    values = json.loads(path.read_text())
    values["optim"]["learning_rate"] = 1e-3
    path.write_text(json.dumps(values))


def checkpoint_of(run: ChainedRun, step: int) -> Path:
    return run.folder / "checkpoints" / f"step_{step:010d}"


def other_checkpoint(run: ChainedRun) -> None:
    folder = checkpoint_of(run, 768)
    (folder / "DONE").write_text((folder / "DONE").read_text().replace("crc32", "crc32 "))


def added_checkpoint(run: ChainedRun) -> None:
    shutil.copytree(checkpoint_of(run, 256), checkpoint_of(run, 300))


def resumed_elsewhere(run: ChainedRun) -> None:
    at = run.record("resume")
    run.rechain(lambda values: values[at]["loaded"].update(manifest="c" * 64))


def adopted(run: ChainedRun) -> None:
    at = run.record("resume")
    run.rechain(lambda values: values[at]["adopted"].append(run.lines[3].strip()))


def removed_between_attempts(run: ChainedRun) -> None:
    """A line of before the checkpoint removed while no pod ran, so that the resume drops it."""
    texts = run.lines
    at = next(n for n, line in enumerate(texts) if '"value": 0.7,' in line)
    gone = texts.pop(at).strip()
    run.write_lines(texts)

    def change(values: list[dict[str, Any]]) -> None:
        number = next(n for n, value in enumerate(values) if value.get("text") == gone)
        values[run.record("resume")]["dropped"].append(number)

    run.rechain(change)


def wrong_time(run: ChainedRun) -> None:
    """Records of a later time than the one at which the operator saw them."""
    run.heads = [Head(h.records, h.sha256, "2001-01-01T00:00:00Z") for h in run.heads or ()]


def older_head(run: ChainedRun) -> None:
    """A chain that does not have the head that was seen, of as many records."""
    assert run.heads
    run.heads = [Head(run.heads[0].records, digest(b"other"), run.heads[0].time)]


FORGERIES: dict[str, tuple[Forgery, str]] = {
    "changed value": (edit("eval_accuracy", "0.58", "0.57"), "value: 0.58 became 0.57"),
    "changed time": (edit("run_stop", '"time_ms": 1', '"time_ms": 2'), "changed in time_ms"),
    "changed samples": (edit("run_stop", "786432", "786431"), "run_stop) was changed in metadata"),
    "changed key": (edit("seed", '"seed"', '"sead"'), "seed) was changed in key"),
    "changed seed": (edit("seed", '"value": 7', '"value": 8'), "seed) was changed in value"),
    "line that is no JSON": (edit("seed", "{", "["), "seed) was changed in its text"),
    "changed spaces": (edit("seed", '": ', '":  '), "seed) was changed in its bytes"),
    "inserted line without the token": (
        lines(lambda all: all.insert(3, "the loss was 0.5")),
        "line 4 was inserted",
    ),
    "text before the token": (
        lines(lambda all: all.__setitem__(3, f"0: {all[3]}")),
        "line 4 was inserted",
    ),
    "removed line": (lines(lambda all: all.pop(5)), "line 6 ("),
    "removed first line": (lines(lambda all: all.pop(0)), "line 1 (cache_clear) was removed"),
    "removed end": (lines(lambda all: all.pop()), "(run_stop) is missing"),
    "inserted line": (
        lines(lambda all: all.insert(9, all[9].replace('"value"', '"value" '))),
        "line 10 (",
    ),
    "duplicated line": (lines(lambda all: all.insert(9, all[8])), "inserted a second time"),
    "appended line": (lines(lambda all: all.append(all[3])), "the chain ends before it"),
    "swapped lines": (lines(lambda all: swap(all, 7, 8)), "line 8 (global_batch_size) was moved"),
    "log with CRLF": (
        lambda run: run.log.write_bytes(run.log.read_bytes().replace(b"\n", b"\r\n")),
        "line 1 (cache_clear) ends with a carriage return",
    ),
    "chain with CRLF": (
        lambda run: run.chain.write_bytes(run.chain.read_bytes().replace(b"\n", b"\r\n")),
        "record 0 ends with a carriage return",
    ),
    "empty log": (lambda run: run.log.write_bytes(b""), "line 1 (cache_clear) is missing"),
    "empty chain": (lambda run: run.chain.write_bytes(b""), "the chain has no record"),
    "changed record": (
        records(lambda all: all.__setitem__(4, all[4].replace(b"MLLOG", b"MLLOH"))),
        "record 4, or one before it, was changed",
    ),
    "removed record": (records(lambda all: all.pop(4)), "record 4 is missing"),
    "inserted record": (records(lambda all: all.insert(4, all[3])), "record 4 was inserted"),
    "swapped records": (records(lambda all: swap(all, 4, 5)), "record 4 is missing"),
    "record that is none": (
        records(lambda all: all.__setitem__(4, b"{}")),
        "record 4 was changed: it is no record",
    ),
    "nested record": (
        records(lambda all: all.__setitem__(4, b"[" * 100_000)),
        "record 4 was changed: it is no record",
    ),
    "log and chain rewritten": (rewritten, "was changed after the operator saw it"),
    "end of log and chain removed": (rewritten_tail, "is missing: the chain has"),
    "chain of another run": (of_another, "after the operator saw it"),
    "two chains": (merged, "was inserted: it says that it is record 0"),
    "attempts swapped": (other_attempts, "record 0 is missing"),
    "configuration replaced": (other_config, "config.json: optim.learning_rate is 0.001"),
    "configuration gone": (
        lambda run: (run.folder / "config.json").write_text("{}"),
        "config.json: adapter_file.dtype is None",
    ),
    "checkpoint replaced": (other_checkpoint, "step_0000000768 is not the checkpoint"),
    "checkpoint removed": (
        lambda run: shutil.rmtree(checkpoint_of(run, 768)),
        "the checkpoint of step 768, the newest one, is not in",
    ),
    "checkpoint added": (added_checkpoint, "step_0000000300 has no record: it was put there"),
    "file of a checkpoint replaced": (
        lambda run: (checkpoint_of(run, 768) / "run.json").write_text('{"step": 769}'),
        "step_0000000768 is not the checkpoint that was saved: run.json differs",
    ),
    "resumed from another state": (resumed_elsewhere, "not the saved checkpoint of step 256"),
    "line written in between attempts": (adopted, "lines were in the log without a record"),
    "line removed between attempts": (
        removed_between_attempts,
        "its line was removed from the log",
    ),
    "head that is none of the chain": (older_head, "was changed after the operator saw it"),
    "later than it was seen": (wrong_time, "is of a later time than 2001-01-01T00:00:00Z"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_named(run: ChainedRun, name: str) -> None:
    forge, text = FORGERIES[name]
    forge(run)
    verdict = run.verify(deep=True)
    assert any(text in finding for finding in verdict.findings), verdict


def test_the_run_that_is_forged_holds(run: ChainedRun) -> None:
    verdict = run.verify(deep=True)
    assert verdict.findings == verdict.notes == []
    assert verdict.result["status"] == "success"
    assert verdict.result["samples"] == 786_432
    assert verdict.result["eval_loss"] == 0.58


@pytest.mark.parametrize("forge", [rewritten, rewritten_tail])
def test_what_is_rewritten_as_a_whole_needs_the_status(run: ChainedRun, forge: Forgery) -> None:
    forge(run)
    save_nothing = run.heads
    run.heads = None
    verdict = run.verify()
    assert any("without --status" in note for note in verdict.notes)
    run.heads = save_nothing
    assert any("operator" in finding for finding in run.verify().findings)


def test_a_chain_that_is_newer_than_the_status_holds(run: ChainedRun) -> None:
    assert run.heads
    del run.heads[1]
    verdict = run.verify()
    assert verdict.holds
    assert any("newer than the last head" in note for note in verdict.notes)


def test_a_checkpoint_that_was_complete_when_the_process_was_killed_is_no_forgery(
    tmp_path: Path,
) -> None:
    run = chained_run(tmp_path, ends=False)
    folder = checkpoint_of(run, 768)
    folder.mkdir()
    (folder / "DONE").write_text("")
    verdict = run.verify()
    assert verdict.holds
    assert any("step_0000000768 has no record" in note for note in verdict.notes)


def test_the_command_prints_what_was_found(
    run: ChainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.heads
    job, heads = tmp_path / "job.yaml", [vars(head) for head in run.heads]
    job.write_text(json.dumps({"kind": "FluxTraining", "status": {"logHeads": heads}}))
    command = ["mlperf", "verify", str(run.folder), "--status", str(job), "--checkpoints"]
    assert main(command) == 0
    assert "result by the chain: status success" in capsys.readouterr().out
    rewritten(run)
    assert main([*command, "--json"]) == 1
    (finding, *_) = json.loads(capsys.readouterr().out)["findings"]
    assert "was changed after the operator saw it" in finding
    job.write_text("{}")
    assert main(command) == 2
    assert "has no heads of a log" in capsys.readouterr().err
    run.chain.unlink()
    assert main(command[:3]) == 2
    assert "has no mlperf.chain.jsonl" in capsys.readouterr().err
