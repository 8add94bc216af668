"""What is found in a repository of results, in its folders, by names of logs and by patterns."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.mlperf.trees.submitters import (
    SUBMITTERS,
    write_code,
    write_other,
    write_result,
    write_tree,
)

from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.review.tree import describe, find, read_results

ALL = 7


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    write_tree(root, (2, 1, 2, 1, 1), runs=2)
    for name in ("bert", "llama31_8b"):
        write_other(root / "Cedar", "box.n1", name)
    write_other(root / "Foxglove", "box", "bert")
    return root


@pytest.mark.parametrize(
    ("names", "places", "others"),
    [
        ([""], ALL, {"bert": 2, "llama31_8b": 1}),
        (["", "Cedar"], ALL, {"bert": 2, "llama31_8b": 1}),
        (["closed"], 3, {}),
        (["closed/Alder"], 2, {}),
        (["Cedar"], 2, {"bert": 1, "llama31_8b": 1}),
        (["Cedar/results"], 2, {"bert": 1, "llama31_8b": 1}),
        (["Cedar/results/box.n1"], 1, {"bert": 1, "llama31_8b": 1}),
        (["Cedar/results/box.n1/flux1"], 1, {}),
        (["Cedar/results/box.n1/flux1/result_0.txt"], 1, {}),
        (["Cedar/results/box.n1/flux1/result_*.txt"], 1, {}),
        (["C*/results/*/*"], 2, {"bert": 1, "llama31_8b": 1}),
        (["Cedar", "Damson/results/box.n1", "Cedar/results/box.n4/flux1"], 3, {"bert": 1}),
        (["closed/*", "Elder"], 4, {}),
        (["**/flux1"], ALL, {}),
        (["**/Cedar/**/*"], 2, {"bert": 1, "llama31_8b": 1}),
    ],
)
def test_results_are_found_from_any_folder_each_once(
    names: list[str], places: int, others: dict[str, int], repository: Path
) -> None:
    found = find([repository / name for name in names])
    assert len(found.places) == places
    assert others.items() <= found.others.items()
    assert bool(found.others) == bool(others)


def test_a_tree_names_the_benchmarks_that_are_left_out(repository: Path) -> None:
    text = find([repository]).describe_others()
    assert text == "left out: 3 results of other benchmarks (bert 2, llama31_8b 1)"
    with pytest.raises(ConfigError, match="1 result of other benchmarks"):
        find([repository / "Foxglove"])


def test_what_was_found_is_said_of_each_result(repository: Path) -> None:
    told = [describe(result) for result in read_results([repository])]
    assert len(told) == ALL
    assert "Alder/box.n4: 2 logs, description yes, code box.n4_pytorch" in told
    assert {text.partition("/")[0] for text in told} == set(SUBMITTERS)


def test_all_logs_of_a_folder_are_its_result_and_one_log_is_a_run(repository: Path) -> None:
    folder = repository / "Cedar/results/box.n1/flux1"
    (both,) = read_results([folder / "result_*.txt"])
    assert (both.folder, len(both.runs)) == (folder, 2)
    (one,) = read_results([folder / "result_1.txt"])
    assert (one.folder, len(one.runs)) == (None, 1)
    (both,) = read_results([folder / "result_1.txt", folder])
    assert len(both.runs) == 2


def test_folders_of_output_folders_are_runs(repository: Path, tmp_path: Path) -> None:
    log = (repository / "Cedar/results/box.n1/flux1/result_0.txt").read_text()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mlperf.log").write_text(log)
    for paths in ([tmp_path], [tmp_path / "*"], [tmp_path, tmp_path / "one/mlperf.log"]):
        (result,) = read_results(paths)
        assert [run.name for run in result.runs] == [str(tmp_path / "one"), str(tmp_path / "two")]


def test_a_pattern_without_a_match_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no log and no result has a name of this pattern"):
        find([tmp_path / "*/results"])


@pytest.mark.parametrize(
    ("folders", "one", "sixteen"),
    [
        (["implementations/box.n16"], None, "box.n16"),
        (
            ["implementations/box.n16_rocm", "implementations/box.n1_rocm"],
            "box.n1_rocm",
            "box.n16_rocm",
        ),
        (["implementations/box_rocm"], "box_rocm", "box_rocm"),
        (["implementations/box", "implementations/box.n16"], "box", "box.n16"),
        (["implementations/a", "implementations/b"], None, None),
        (["implementations", "pytorch"], "pytorch", "pytorch"),
        (["box.n1", "implementations/box.n16"], "box.n1", "box.n16"),
        (["implementations", "."], "flux1", "flux1"),
        ([], None, None),
    ],
)
def test_code_is_found_by_the_longest_name(
    folders: list[str], one: str | None, sixteen: str | None, tmp_path: Path
) -> None:
    for system in ("box.n1", "box.n16"):
        write_result(tmp_path / "org", system, evaluations=[3], code=None)
    for name in folders:
        if name == "implementations":
            (tmp_path / "org/benchmarks/flux1/implementations").mkdir(parents=True)
        else:
            write_code(tmp_path / "org/benchmarks/flux1" / name)
    found = [result.implementation for result in read_results([tmp_path / "org"])]
    assert [code and code.name for code in found] == [one, sixteen]
