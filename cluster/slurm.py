"""A real Slurm of three nodes on this machine, with munge, in namespaces of its own.

All daemons share a network, a mount, a PID and a host-name namespace, which end with the block that runs
them: nothing of the machine is changed but Debian's packages, which `ensure` installs, and nothing is left.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cluster.commands import run
from cluster.console import wait_until
from cluster.errors import ClusterError
from cluster.programs import packages
from cluster.programs.packages import program

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
}
"""Program -> its Debian package."""
NODES = {"n1": "10.77.0.1", "n2": "10.77.0.2", "n3": "10.77.0.3"}
"""The nodes' names, which their addresses are found by."""
START_SECONDS = 60
_FIRST_PORT = 6821
"""Of the nodes' daemons, which listen on all addresses."""
_HOSTNAME = "fluxtrain-slurm"
_CONFIG = "/run/slurm/slurm.conf"
_SETTINGS = f"""\
ClusterName=fluxtrain
SlurmctldHost={_HOSTNAME}({NODES["n1"]})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
ReturnToService=2
MessageTimeout=60
KillWait=120
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/%n
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/%n.pid
SlurmdParameters=config_overrides
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_MACHINE = """\
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/munge /run/slurm/state
cp "$1/munge.key" /run/munge.key
chmod 600 /run/munge.key
cp "$1/slurm.conf" /run/slurm/slurm.conf
mount --bind "$1/hosts" /etc/hosts
hostname {hostname}
ip link set lo up
for address in {addresses}; do ip address add $address/32 dev lo; done
export SLURM_CONF=/run/slurm/slurm.conf
munged --foreground --force --key-file=/run/munge.key --pid-file=/run/munge.pid --seed-file=/run/munge.seed \
    > "$1/munged.log" 2>&1 &
while [ ! -S /run/munge/munge.socket.2 ]; do sleep 0.1; done
slurmctld -D -i > "$1/slurmctld.log" 2>&1 &
for name in {names}; do slurmd -D -N $name > "$1/slurmd-$name.log" 2>&1 & done
wait
"""


def ensure() -> None:
    """Install missing packages; MachineError if the machine has no apt-get."""
    packages.ensure_programs(PROGRAMS)


class Slurm:
    """The running Slurm, whose first process is ``pid``."""

    def __init__(self, pid: int, folder: Path) -> None:
        """Take the process id and the folder of the logs."""
        self._pid, self._folder = pid, folder

    def run(self, *argv: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Return the output of a program that runs among the daemons, such as squeue, in their folder.

        Raises ClusterError if it fails.
        """
        namespaces = ["--net", "--mount", "--pid", "--uts"]
        enter = [program("nsenter"), f"--target={self._pid}", *namespaces, f"--wd={self._folder}"]
        variables = {"SLURM_CONF": _CONFIG, **(env or {})}
        return run([*enter, "--", *argv], env=variables, seconds=60)

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING; empty once Slurm has forgotten it."""
        for line in self.run("scontrol", "show", "--oneliner", "job", job).split():
            if line.startswith("JobState="):
                return line.partition("=")[2]
        return ""

    def wait_for(self, job: str, *states: str, seconds: float = 60) -> None:
        """Wait until a job has one of ``states``; ClusterError after ``seconds``."""
        what = f"job {job}: {' or '.join(states)}"
        wait_until(lambda: self.state(job) in states, what, seconds=seconds)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        ends = (path.read_text(errors="replace")[-2000:] for path in self._folder.glob("*.log"))
        return "\n".join(ends)


@contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """Run Slurm with its files and logs in ``folder`` until the block ends.

    Raises ClusterError if the nodes are not idle within a minute, MachineError if a program is missing.
    """
    _write(folder)
    text = _MACHINE.format(
        hostname=_HOSTNAME, addresses=" ".join(NODES.values()), names=" ".join(NODES)
    )
    path = os.pathsep.join((packages.search_path(), "/usr/bin", "/bin"))
    namespaces = ["--net", "--mount", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child"]
    command = [program("unshare"), *namespaces, "bash", "-c", text, "slurm", str(folder)]
    with (folder / "machine.log").open("wb") as log:
        outer = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "PATH": path},
            start_new_session=True,
        )
    try:
        slurm = Slurm(_first_child(outer), folder)
        _wait_until_idle(slurm)
        yield slurm
    finally:
        outer.kill()  # and by --kill-child all that runs in the namespaces
        outer.wait()


def _write(folder: Path) -> None:
    lines = [f"{address} {name}" for name, address in NODES.items()]
    hosts = ["127.0.0.1 localhost", f"{NODES['n1']} {_HOSTNAME}", *lines]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    nodes = [
        f"NodeName={name} NodeHostname={_HOSTNAME} NodeAddr={address} Port={port} CPUs=1 State=UNKNOWN"
        for port, (name, address) in enumerate(NODES.items(), _FIRST_PORT)
    ]
    (folder / "slurm.conf").write_text(_SETTINGS + "\n".join(nodes) + "\n")


def _first_child(process: subprocess.Popen[bytes]) -> int:
    """Return the child of ``process``, which is process 1 of the namespace."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if children := path.read_text().split():
            return int(children[0])
        time.sleep(0.05)
    raise ClusterError("unshare has started nothing")


def _wait_until_idle(slurm: Slurm) -> None:
    def is_idle() -> bool:
        try:
            return slurm.run("sinfo", "--noheader", "--format=%D %t").split() == ["3", "idle"]
        except ClusterError:
            return False

    try:
        wait_until(is_idle, "three idle nodes of Slurm", seconds=START_SECONDS)
    except ClusterError as error:
        raise ClusterError(f"{error}\n{slurm.logs()}") from None
