"""When examples/slurm/train.sbatch queues its job again, with programs in place of Slurm's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.paths import EXAMPLES

SCONTROL = """\
#!/usr/bin/env bash
[ "$1" = show ] && echo n1 || echo "$@" >> "$FOLDER/told"
"""


def job(folder: Path, code: int, restarts: int) -> tuple[int, str]:
    """Run the script, whose srun ends with ``code``; return its own code, and what scontrol was told."""
    for name, text in (("srun", f"#!/usr/bin/env bash\nexit {code}\n"), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    variables = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "FOLDER": str(folder),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    script = EXAMPLES / "slurm" / "train.sbatch"
    ended = subprocess.run(["bash", script, "job.yaml"], env=variables, timeout=60, check=False)
    told = folder / "told"
    return ended.returncode, told.read_text() if told.exists() else ""


@pytest.mark.parametrize(
    ("code", "restarts", "queues_again"),
    [
        (0, 0, False),
        (1, 0, True),
        (1, 4, True),
        (1, 5, False),
        (2, 0, False),
        (3, 0, False),
        (75, 0, False),
        (137, 0, True),  # srun's, if one of its nodes was lost, however the run ended on the others
        (137, 5, False),
    ],
)
def test_a_job_queues_again_after_a_failure_or_a_lost_node(
    tmp_path: Path, code: int, restarts: int, queues_again: bool
) -> None:
    assert job(tmp_path, code, restarts) == (code, "requeue 7\n" if queues_again else "")
