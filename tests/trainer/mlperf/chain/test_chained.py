"""The review compares each log with its chain, in a run's folder, a fetched job and a package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.trainer.mlperf.chain.chained_run import ChainedRun, chained_run

from fluxtrain.contract.process import CONFIG_FILE
from fluxtrain.mlperf.evidence import run_of
from fluxtrain.mlperf.jobs import RAN_JOB_FILE, ran_job
from fluxtrain.mlperf.review.run_rules import log_follows_its_chain


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
