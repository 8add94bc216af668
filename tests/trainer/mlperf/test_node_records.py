"""Each node reports its hardware and software in the log; equal nodes are one record, and no line is long."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path

import pytest
from tests.trainer.commands import fluxtrain

from fluxtrain.mlperf import facts as node_records
from fluxtrain.mlperf.facts import SOURCE, NodeRecord, node_facts, revision, source_digest
from fluxtrain.mlperf.log_lines import read_lines
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime.installed import packages


def files(root: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def test_the_packages_are_those_of_pythons_metadata() -> None:
    theirs = {each.name.lower().replace("_", "-").replace(".", "-") for each in distributions()}
    versions = {each.name.lower().replace("_", "-"): each.version for each in distributions()}
    ours = packages()
    assert theirs <= set(ours)
    assert ours["torch"] == versions["torch"]
    assert ours["mlperf-logging"] == versions["mlperf-logging"]


def test_drivers_and_cards_are_read_from_the_kernel(tmp_path: Path) -> None:
    card = "sys/class/net"
    files(
        tmp_path,
        {
            "sys/module/amdgpu/version": "6.12.12",
            f"{card}/eth0/speed": "25000",
            f"{card}/eth1/speed": "-1",
            f"{card}/lo/speed": "0",
            "drivers/mlx5_core/x": "",
            **{
                f"sys/class/infiniband/mlx5_{i}/{name}": text
                for i in range(8)
                for name, text in {
                    "hca_type": "MT4129",
                    "ports/1/rate": "400 Gb/sec (4X NDR)",
                    "ports/1/link_layer": "Ethernet",
                }.items()
            },
        },
    )
    for name in ("eth0", "eth1"):
        (tmp_path / card / name / "device").mkdir()
        (tmp_path / card / name / "device/driver").symlink_to(tmp_path / "drivers/mlx5_core")
    facts = node_facts(8, tmp_path)
    assert facts["accelerator_driver"] == "amdgpu 6.12.12"
    assert facts["network_cards"] == (
        "1 x mlx5_core 25 Gb/s, 1 x mlx5_core link down, 8 x RDMA MT4129 Ethernet 400 Gb/sec"
    )
    assert "number_of_nodes" not in facts
    assert "network_cards" not in node_facts(8, tmp_path / "nothing")


def test_equal_nodes_are_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [{"accelerator_model_name": "another"}, {}, {}]
    fast = [{"accelerator_model_name": "MI300X"}, {"python": "3.12"}, {"a": "1"}]
    told = [json.dumps(each) for each in (fast, fast, slow, fast, fast, slow)]
    monkeypatch.setattr(World, "all_gather", lambda self, own: told)
    first, second = node_records.gather(World.alone())
    assert (first.nodes, second.nodes) == ("0-1,3-4", "2,5")
    assert first.packages == {"a": "1"}
    assert second.hardware == {"accelerator_model_name": "another"}


def test_records_are_read_back_from_their_events() -> None:
    many = {f"package-{number:03}": f"{number}.0.0" for number in range(400)}
    records = [
        NodeRecord("0-1", {"accelerators_per_node": "8"}, {"python": "3.12"}, many),
        NodeRecord("2", {"accelerators_per_node": "4"}, {"python": "3.12"}, {"a": "1"}),
    ]
    events = list(node_records.events(records))
    assert max(len(json.dumps(value)) for _, value in events) < 3500
    assert node_records.read(events) == records
    assert node_records.read([("fluxtrain_nodes", 3), ("fluxtrain_packages", {"packages": 1})]) == [
        NodeRecord("None", {}, {}, {})
    ]


def test_the_digest_changes_with_names_and_contents_of_sources_alone(tmp_path: Path) -> None:
    files(tmp_path, {"a.py": "1", "b/c.py": "2"})
    digests = {source_digest(tmp_path)}
    files(tmp_path, {"b/__pycache__/c.pyc": "x", ".hidden": "x", "d.pyc": "x"})
    assert source_digest(tmp_path) in digests
    files(tmp_path, {"b/c.py": "3"})
    digests.add(source_digest(tmp_path))
    (tmp_path / "a.py").rename(tmp_path / "e.py")
    digests.add(source_digest(tmp_path))
    assert len(digests) == 3
    shutil.copytree(SOURCE, tmp_path / "copy")
    assert source_digest(tmp_path / "copy") == source_digest(SOURCE)


def test_the_revision_is_the_images_or_that_of_the_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tmp_path), *name, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    files(tmp_path, {"package/__init__.py": "", "other/__init__.py": ""})
    package = tmp_path / "package"
    assert revision(package, {"FLUXTRAIN_REVISION": "abc"}) == "abc"
    assert revision(package, {"FLUXTRAIN_REVISION": "unknown"}) == ""
    git("init", "--quiet")
    git("add", "package")
    git("commit", "--quiet", "--message", "first")
    commit = git("rev-parse", "HEAD")
    assert revision(package, {}) == commit
    assert revision(tmp_path / "other", {}) == ""
    files(package, {"__init__.py": "changed"})
    assert revision(package, {}) == f"{commit}+changes"


@pytest.mark.slow
def test_a_run_of_two_ranks_states_its_node_and_software(tmp_path: Path) -> None:
    changes = ("--schedule.steps=2", "--evaluation.every_samples=0", "--logging.metrics_port=0")
    arguments = ("examples/micro.yaml", *changes, "--output", str(tmp_path), "--processes", "2")
    run = fluxtrain("run", *arguments)
    assert run.returncode == 0, run.stderr
    lines = [line for line in read_lines(tmp_path / "mlperf.log") if not line.fault]
    (record,) = node_records.read([(line.key, line.value) for line in lines])
    assert record.nodes == "0"
    assert record.hardware == node_facts(2)
    assert record.software["source_sha256"] == source_digest(SOURCE)
    assert record.packages == packages()
    assert max(len(line.text) for line in lines) < os.pathconf("/", "PC_PIPE_BUF")
