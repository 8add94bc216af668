"""The error message if the cluster cannot start."""

from __future__ import annotations

import subprocess
import sys

from tests.paths import ROOT

AS_NOBODY = """
import os, sys
from cluster.__main__ import main
os.geteuid() or os.seteuid(65534)
sys.argv[1:] = {arguments!r}
sys.exit(main())
"""


def run_as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = AS_NOBODY.format(arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"HOME": "/nonexistent", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_error_without_root_says_what_is_needed() -> None:
    done = run_as_nobody("up")
    assert done.returncode == 2
    assert "root is needed" in done.stderr
    assert "sudo make cluster" in done.stderr
    assert "Traceback" not in done.stderr
