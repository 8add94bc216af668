"""Completion with the generated scripts, in bash, zsh and tcsh."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest
from cluster.errors import ClusterError
from cluster.programs import debian

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


PACKAGES = {"zsh": ("zsh", "zsh-common"), "tcsh": ("tcsh",)}
ZSH_ENVIRONMENT = """
module_path=({root}/usr/lib/*/zsh/*(/))
fpath=({root}/usr/share/zsh/functions {root}/usr/share/zsh/functions/**/*(/N))
"""
SECONDS = 60


def unpacked(shell: str) -> Path:
    """Return the folder with the files of Debian's packages of ``shell``."""
    try:
        return debian.unpacked(*PACKAGES[shell])
    except (ClusterError, OSError) as error:
        pytest.skip(f"no {shell}: {error}")


def completed(shell: str, script: Path, typed: str, expected: str) -> str:
    """Return what ``shell`` shows of ``typed`` and Tab, at the latest when it shows ``expected``."""
    root, home = unpacked(shell), script.parent
    (home / ".zshenv").write_text(ZSH_ENVIRONMENT.format(root=root))
    load = {"zsh": f'autoload -U compinit; compinit -u -D; eval "$(<{script})"'}
    environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm", "HOME": str(home)}
    leader, terminal = pty.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", root / "bin" / shell, "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=home,
        env=environment,
    ) as process:
        try:
            lines = (load.get(shell, f"source {script}"), "echo READ''Y")
            os.write(leader, "".join(f"{line}\n" for line in lines).encode())
            _read(leader, "READY")
            os.write(leader, f"{typed}\t".encode())
            return _read(leader, expected)
        finally:
            process.kill()
            os.close(terminal)
            os.close(leader)


def _read(leader: int, until: str) -> str:
    text, deadline = "", time.monotonic() + SECONDS
    while until not in text and time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            text += os.read(leader, 4096).decode(errors="replace")
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fluxtrain pre", "fluxtrain prepare"),
        ("fluxtrain mlperf che", "fluxtrain mlperf check"),
        ("fluxtrain run --optim.learning", "--optim.learning_rate"),
    ],
)
@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_complete(
    shell: str, words: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["completion", shell]) == EXIT_OK
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    assert expected in completed(shell, script, words, expected)
