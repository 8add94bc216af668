"""Commands in any locale: text that a stream cannot encode is escaped, files and their names are UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from fluxtrain.errors import EXIT_OK, EXIT_STORAGE, EXIT_USAGE

pytestmark = pytest.mark.slow

NO_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LOCALES = {
    "none": NO_LOCALE,
    "C": {"LC_ALL": "C"},
    "Latin-1 streams": {"PYTHONIOENCODING": "latin-1"},
    "ASCII streams": {"PYTHONIOENCODING": "ascii:strict", **NO_LOCALE},
}
JOB = """\
# 日本 →
apiVersion: fluxtrain.dev/v1alpha1
kind: FluxTraining
metadata: {name: job}
spec:
  image: x
  run: {preset: dev-lora, data: {images: größe日, image_size: 256}}
"""
PROGRAMS = {
    "fluxtrain": "from fluxtrain.cli import main; sys.exit(main())",
    "kubectl": "from fluxtrain_operator.kubectl import run; sys.exit(run())",
    "operator": "from fluxtrain_operator.__main__ import main; sys.exit(main())",
}
PROGRAM = """
import os, subprocess, sys
from fluxtrain.runtime.program import run
def body():
{}
sys.exit(run("fluxtrain", "trainer", body))
"""
PRINTS = PROGRAM.format("""\
    print("1 \\u2192 2 \\udcff")
    print("\\u2192", file=sys.stderr)
    return 0""")
WRITES = PROGRAM.format("""\
    print("x" * int(sys.argv[1]))
    return 1""")
GOES_ON = PROGRAM.format("""\
    for _ in range(3):
        print("step", file=sys.stderr, flush=True)
    os.write(2, b"of a library")
    subprocess.run(["sh", "-c", "echo of a child >&2"], check=True)
    open(sys.argv[1], "w").close()
    return 7""")


def python(
    code: str, locale: str, *arguments: str, folder: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    unset = {"LANG", "LC_ALL", "LC_CTYPE", "PYTHONUTF8", "PYTHONIOENCODING"}
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}", *arguments],
        capture_output=True,
        timeout=120,
        check=False,
        cwd=folder,
        env=environment | LOCALES[locale],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    pictures = tmp_path / "größe日"
    pictures.mkdir()
    for name, color in (("bild→", "red"), ("猫", "blue")):
        Image.new("RGB", (256, 256), color).save(pictures / f"{name}.png")
        (pictures / f"{name}.txt").write_text("eine Katze → 猫\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("locale", LOCALES)
def test_any_text_is_printed(locale: str) -> None:
    done = python(PRINTS, locale)
    assert done.returncode == EXIT_OK, done.stderr
    assert done.stdout in (b"1 \\u2192 2 \\udcff\n", "1 → 2 \\udcff\n".encode())


@pytest.mark.parametrize("size", [1, 100_000])
def test_output_that_cannot_be_written_ends_in_no_traceback(size: int) -> None:
    command = [sys.executable, "-c", WRITES, str(size)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False
        )
    assert done.returncode == EXIT_STORAGE
    assert done.stderr.splitlines() == [
        b"fluxtrain: error: the output cannot be written (No space left on device)"
    ]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(writer)
    assert done.returncode in (EXIT_OK, 1)
    assert done.stderr == b""


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-", "<&-"])
def test_a_program_goes_on_with_closed_streams(closed: str, tmp_path: Path) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", GOES_ON]
    done = subprocess.run([*command, tmp_path / "done"], capture_output=True, timeout=120)
    assert done.returncode == 7
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("is_full", [True, False])
def test_a_program_goes_on_without_its_stderr(is_full: bool, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if is_full else writer, "wb") as stderr:
        command = [sys.executable, "-c", GOES_ON, str(tmp_path / "done")]
        done = subprocess.run(command, stderr=stderr, timeout=120, check=False)
    assert done.returncode == 7
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("locale", ["none", "Latin-1 streams"])
def test_names_and_captions_of_pictures_are_utf_8(locale: str, folder: Path) -> None:
    arguments = ("data", "check", "-f", "job.yaml", "--data", ".", "--all")
    done = python(PROGRAMS["fluxtrain"], locale, *arguments, folder=folder)
    assert (done.returncode, done.stderr) == (EXIT_OK, b"")
    assert b": 2 pictures can be used (2 png)" in done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_argument_with_any_characters_is_refused_in_one_line(program: str) -> None:
    done = python(PROGRAMS[program], "none", "größe→")
    assert done.returncode == EXIT_USAGE
    assert b"Traceback" not in done.stderr
    assert b"\\u2192" in done.stderr or program == "operator"  # which names the missing option
