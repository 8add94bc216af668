"""The chain of an MLPerf log: hashed as it is written, and verified."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
from tests.trainer.mlperf.chain.chained_run import (
    ChainedRun,
    chained_run,
    configuration,
    evaluate,
    open_log,
)

from fluxtrain.contract.process import CONFIG_FILE
from fluxtrain.errors import StorageError
from fluxtrain.mlperf import RULESETS, check
from fluxtrain.mlperf.chain import Chain, digest, parse, split
from fluxtrain.mlperf.chain_verify import hash_weights, start_facts, verify
from fluxtrain.mlperf.evidence import run_of
from fluxtrain.mlperf.jobs import RAN_JOB_FILE, ran_job
from fluxtrain.mlperf.review.run_rules import log_follows_its_chain
from fluxtrain.state.run_state import RunState

pytestmark = pytest.mark.slow


def write_until_killed(run: ChainedRun, ready: int) -> NoReturn:
    try:
        log = open_log(run, configuration(), RunState(0, 0))
        log.ready()
        os.write(ready, b"1")
        for count in range(1, 1_000_000):
            evaluate(log, count, 0.7)
    finally:
        os._exit(1)


@pytest.mark.parametrize("ruleset", RULESETS)
def test_mlcommons_checker_accepts_the_log(tmp_path: Path, ruleset: str) -> None:
    run = chained_run(tmp_path)
    assert '"key": "fluxtrain_chain"' in run.log.read_text()
    run.log.write_text(
        run.log.read_text().replace('"cache_clear", "value": false', '"cache_clear", "value": true')
    )
    checked = check(run.log, ruleset)
    assert checked.success, checked


@pytest.mark.parametrize("removed", ["log", "chain"])
def test_a_file_that_is_cut_at_any_byte_of_its_end_is_torn_or_forged(
    tmp_path: Path, removed: str
) -> None:
    run = chained_run(tmp_path, ends=False)
    run.heads = None
    log, chain = run.log.read_bytes(), run.chain.read_bytes()
    last_line = len(log.rstrip(b"\n").rpartition(b"\n")[2]) + 1
    last_record = len(chain.rstrip(b"\n").rpartition(b"\n")[2]) + 1
    size = last_line if removed == "log" else last_record
    for count in range(1, size + 40):
        cut = {"log": log, "chain": chain}
        cut[removed] = cut[removed][:-count]
        verdict = verify(cut["log"], cut["chain"])
        # a line without its record cannot be: the record is written first
        is_torn = removed == "log" and count <= size
        assert verdict.holds == is_torn, (count, verdict)
    # both torn, as a process leaves them: the record began, its line did not
    for count in range(1, last_record + 1):
        assert verify(log[:-last_line], chain[:-count]).holds, count


def test_a_killed_process_leaves_a_chain_that_holds_and_goes_on(tmp_path: Path) -> None:
    config = configuration()
    (tmp_path / "config.json").write_text(config.model_dump_json())
    run = ChainedRun(tmp_path)
    for _ in range(4):
        began, ready = os.pipe()
        if (process := os.fork()) == 0:
            write_until_killed(run, ready)
        assert os.read(began, 1) == b"1"
        time.sleep(0.05)
        os.kill(process, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(process, 0)[1])
        os.close(began)
        os.close(ready)
        assert run.verify().findings == []
    log = open_log(run, config, RunState(0, 0), pods=["another"])
    log.close()
    assert run.verify().findings == []
    assert parse(run.records[run.record("resume")]).values["pods"] == ["another"]


def test_a_torn_record_is_replaced_by_the_next_start(tmp_path: Path) -> None:
    run = chained_run(tmp_path, ends=False)
    run.heads = None
    with run.chain.open("ab") as file:
        file.write(b'{"number": 7')
    log = open_log(run, configuration(), RunState(256, 262_144))
    log.close()
    assert run.verify().holds
    assert parse(run.records[run.record("resume")]).values["torn_bytes"] == 12


def test_a_resume_after_an_edit_of_the_log_is_found(tmp_path: Path) -> None:
    run = chained_run(tmp_path, ends=False)
    run.write_lines([line.replace('"value": 0.7,', '"value": 0.5,') for line in run.lines])
    log = open_log(run, configuration(), RunState(256, 262_144))
    evaluate(log, 2, 0.57)
    log.close()
    first, second, *_ = run.verify().findings
    assert "1 lines were in the log without a record, the first of them eval_accuracy" in first
    assert "its line was removed from the log" in second


def test_the_heads_that_are_published_are_on_the_disk_and_of_the_file(tmp_path: Path) -> None:
    path, heads = tmp_path / "chain", list[tuple[int, str]]()
    facts = start_facts(configuration(), 1, (), None, {})
    chain = Chain.open(path, [], facts, on_head=lambda *head: heads.append(head))
    for number in range(20):
        chain.line(f":::MLLOG {number}", durable=number % 2 == 0)
    chain.close(finished=True)
    lines, _ = split(path.read_bytes())
    assert heads[-1] == (len(lines), digest(lines[-1])) == (22, heads[-1][1])
    assert all(digest(lines[count - 1]) == head for count, head in heads)
    left_behind = Chain.open(path, [], facts)
    newer = Chain.open(path, [], facts)
    left_behind._on_head = lambda *head: heads.append(head)
    left_behind.line(":::MLLOG of a rank that was left behind")
    left_behind.close()
    newer.close()
    assert heads[-1][0] == 22


def test_the_initial_weights_are_hashed_beside_the_training(tmp_path: Path) -> None:
    weights = tmp_path / "model"
    weights.mkdir()
    (weights / "one.safetensors").write_bytes(b"1" * 3_000_000)
    chain = Chain.open(tmp_path / "chain", [], {})
    hash_weights(chain, weights, threading.Event())
    stopped = threading.Event()
    stopped.set()
    hash_weights(chain, weights, stopped)
    chain.close()
    lines, _ = split((tmp_path / "chain").read_bytes())
    (record,) = (parse(line) for line in lines[1:])
    assert record.values["sha256"] == digest(b"1" * 3_000_000)
    assert record.values["bytes"] == 3_000_000


def test_a_chain_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing/chain: cannot be read or written"):
        Chain.open(tmp_path / "missing" / "chain", [], {})


@pytest.fixture
def run(tmp_path: Path) -> ChainedRun:
    return chained_run(tmp_path)


def findings(log: Path, config: Path | None) -> list[str]:
    return list(log_follows_its_chain.check(run_of(log, config)))


def forge(run: ChainedRun) -> None:
    run.log.write_text(run.log.read_text().replace('"value": 0.58,', '"value": 0.57,'))


def test_a_run_whose_log_was_changed_or_has_lost_its_chain_is_found(run: ChainedRun) -> None:
    config = run.folder / CONFIG_FILE
    assert findings(run.log, config) == []
    forge(run)
    (finding,) = findings(run.log, config)
    assert "eval_accuracy) was changed in value: 0.58 became 0.57" in finding
    run.chain.unlink()
    assert findings(run.log, config) == ["the log has a chain, and there is no mlperf.chain.jsonl"]
    assert findings(run.log, None) == []  # a log alone, such as that of a pod


def test_a_fetched_job_is_compared_with_the_heads_of_its_status(run: ChainedRun) -> None:
    heads = [vars(head) for head in run.heads or ()]
    job = {"apiVersion": "v1", "kind": "FluxTraining", "spec": {}, "status": {"logHeads": heads}}
    (run.folder / RAN_JOB_FILE).write_text(json.dumps(ran_job(job, [])))
    assert findings(run.log, run.folder / CONFIG_FILE) == []
    shutil.rmtree(run.folder / "checkpoints")
    for path in (run.log, run.chain):
        path.unlink()
    chained_run(run.folder)  # another run, whose log and chain agree
    (finding,) = findings(run.log, run.folder / CONFIG_FILE)
    assert "was changed after the operator saw it" in finding


def test_a_package_has_the_chain_beside_the_configuration(run: ChainedRun, tmp_path: Path) -> None:
    code, log = tmp_path / "code", tmp_path / "result_3.txt"
    code.mkdir()
    shutil.copyfile(run.folder / CONFIG_FILE, code / "config_3.json")
    shutil.copyfile(run.chain, code / "chain_3.jsonl")
    shutil.copyfile(run.log, log)
    assert findings(log, code / "config_3.json") == []
    (code / "chain_3.jsonl").unlink()
    (finding,) = findings(log, code / "config_3.json")
    assert finding == "the log has a chain, and there is no chain_3.jsonl"
