"""Completion: bash with the generated script, and the scripts of the other shells."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_OK

ASK = """
source {script}
COMP_WORDS=({words}) COMP_CWORD=$(({count} - 1)) COMP_LINE="{words}" COMP_POINT=${{#COMP_LINE}}
_shtab_fluxtrain fluxtrain {last!r} {previous!r}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "fluxtrain.bash"
    with pytest.MonkeyPatch.context() as patch, file.open("w") as stream:
        patch.setattr("sys.stdout", stream)
        assert main(["completion", "bash"]) == EXIT_OK
    return file


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fluxtrain pre", {"prepare"}),
        ("fluxtrain mlperf che", {"check"}),
        ("fluxtrain doc", {"doctor"}),
        ("fluxtrain plan --gp", {"--gpu", "--gpu-hour"}),
        ("fluxtrain run --optim.learning", {"--optim.learning_rate"}),
        ("fluxtrain import-config --pro", {"--prompt-file"}),
        ("fluxtrain plan job", {"job.yaml"}),
    ],
)
def test_bash_completes(words: str, expected: set[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    *_, previous, last = words.split()
    ask = ASK.format(
        script=script, words=words, count=len(words.split()), last=last, previous=previous
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, cwd=tmp_path)
    assert expected <= set(done.stdout.split()), done.stderr
    assert all(word.startswith(last) for word in done.stdout.split())


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == EXIT_OK
    assert "import-config" in capsys.readouterr().out
