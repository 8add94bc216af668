"""Session: a cluster of three nodes with our CRD, the image of the faults, the operator and the jobs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import cluster
from cluster.commands import run
from cluster.host import mounts
from cluster.kubectl import Manifest
from cluster.layout import KUBECONFIG
from cluster.nodes import images, volumes
from cluster.programs.packages import program
from tests.api_server.client import Kubectl
from tests.end_to_end import stage, trainer_image
from tests.end_to_end.jobs import Jobs
from tests.faults.target import IMAGE, NUM_NODES, Target
from tests.paths import ROOT

NAMESPACE = "faults"
NODE_GRACE_SECONDS = 20
OUTPUT_SIZE = "48m"
HERE = Path(__file__).parent
FILES = {"inside_pods-1.dist-info/entry_points.txt": "[torch.backends]\nin = inside_pods:install\n"}


@contextmanager
def session() -> Iterator[Session]:
    """Yield a session; a cluster that did not run before is removed at the end."""
    created = not KUBECONFIG.exists()
    cluster.prepare()
    kubectl = Kubectl(cluster.up(NUM_NODES, NODE_GRACE_SECONDS))
    with tempfile.TemporaryDirectory(prefix="faults-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        stack.callback(mounts.unmount, folder)
        if created:
            stack.callback(cluster.down)
        current = Session(kubectl, folder)
        if not created:
            stack.callback(current.clear)
        stack.callback(lambda: current.jobs.operator.stop())  # there may be another by then
        yield current


class Session:
    """The operator, and a namespace for the jobs."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        """Load the images, and start the operator; ``folder`` holds the jobs' outputs and logs."""
        self.kubectl, self.folder = kubectl, folder
        load_images(folder)
        crd = f"--filename={ROOT / 'manifests' / 'crd.yaml'}"
        kubectl("apply", "--server-side", "--force-conflicts", crd)
        kubectl.wait_for_crds()
        stage.make_namespace(kubectl, NAMESPACE)
        kubectl.apply(*volumes.site_packages("packages", NAMESPACE), namespace=NAMESPACE)
        self.jobs = Jobs(kubectl, folder, NAMESPACE)
        self.jobs.operator.start()
        self._num_jobs = 0

    def create_job(
        self, spec: Manifest | None = None, prepare: Callable[[Path], None] | None = None
    ) -> Target:
        """Create a job of its own name and output, in which ``prepare`` writes data; return it."""
        self._num_jobs += 1
        name = f"job-{self._num_jobs}"
        output = self.folder / name
        output.mkdir()
        # small, so that it can be filled
        run([program("mount"), "-t", "tmpfs", "-o", f"size={OUTPUT_SIZE}", "faults", output])
        shutil.chown(output, images.USER_ID, images.USER_ID)
        if prepare is not None:
            prepare(output)
        claim = volumes.host_folder(f"output-{name}", output, NAMESPACE, read_only=False)
        self.kubectl.apply(*claim, namespace=NAMESPACE)
        target = Target(self.jobs, name, output, spec)
        target.apply()
        return target

    def clear(self) -> None:
        """Delete all jobs, pods and volumes."""
        here = f"--namespace={NAMESPACE}"
        self.kubectl("delete", "fluxtraining", "--all", here, seconds=120)
        self.kubectl("delete", "pod", "--all", here, "--grace-period=0", "--force")
        self.kubectl("delete", "pvc", "--all", here, seconds=120)
        names = ["packages", *(f"output-job-{n + 1}" for n in range(self._num_jobs))]
        self.kubectl("delete", "pv", *(f"{NAMESPACE}-{name}" for name in names), seconds=120)


def load_images(folder: Path) -> None:
    """Build the trainer's image with the hooks of inside_pods.py, and load it into all nodes."""
    base, context = folder / "image", folder / "hooks"
    base.mkdir()
    trainer_image.build(base)
    context.mkdir()
    shutil.copy(HERE / "inside_pods.py", context)
    trainer_image.write(context, FILES)
    dockerfile, arguments = HERE / "faults.Dockerfile", {"BASE": stage.IMAGE}
    images.load([images.build(IMAGE, dockerfile, context, arguments)])


def machine() -> str:
    """Return the size of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"
