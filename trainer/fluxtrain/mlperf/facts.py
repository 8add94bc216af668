"""What a run states of itself in the MLPerf log before it starts: its work, its nodes, its software.

Nodes are read from /proc, /sys and torch; equal ones are one record. A line has at most 4 KiB, so that
it is written whole to a pipe with several writers. The submitter adds what a node does not know:
cooling, networks.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxtrain import __version__
from fluxtrain.contract.process import CONFIG_FILE, ENV_FLUSHED, ENV_REVISION, ranges
from fluxtrain.contract.run.closed_division import (
    Violation,
    begins_closed,
    claims_closed,
    violations,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.precision import Precision
from fluxtrain.data.order import BatchShares
from fluxtrain.runtime.installed import packages

if TYPE_CHECKING:
    from fluxtrain.parallel.distributed import World


NODES_KEY, SOFTWARE_KEY = "fluxtrain_nodes", "fluxtrain_software"
PACKAGES_KEY = "fluxtrain_packages"
NODE_KEYS = (NODES_KEY, SOFTWARE_KEY, PACKAGES_KEY)
"""Each event names its ``nodes``, such as 0-3,5 in the order of the ranks; packages fill several."""
_POSITIONS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_MAX_CHARACTERS = 3000
"""Of the packages of one event: a pipe takes 4096 bytes at once."""


@dataclass(frozen=True)
class NodeRecord:
    """What one node, or several equal ones, reported."""

    nodes: str
    """Positions in the order of the ranks, such as 0-3,5."""
    hardware: Mapping[str, str]
    software: Mapping[str, str]
    packages: Mapping[str, str]


def gather(world: World) -> list[NodeRecord]:
    """Return the records of all nodes; every rank must call it."""
    own: list[str] = []
    if world.local_rank == 0:
        told = [node_facts(world.local_size), software_facts(), packages()]
        own = [json.dumps(told, sort_keys=True)]
    positions: dict[str, list[int]] = {}
    for node, text in enumerate(world.all_gather(own)):
        positions.setdefault(text, []).append(node)
    return [
        NodeRecord(",".join(ranges(nodes)), *json.loads(text)) for text, nodes in positions.items()
    ]


def events(records: Sequence[NodeRecord]) -> Iterator[tuple[str, object]]:
    for record in records:
        yield NODES_KEY, {"nodes": record.nodes, **record.hardware}
        yield SOFTWARE_KEY, {"nodes": record.nodes, **record.software}
        for part in _parts(record.packages):
            yield PACKAGES_KEY, {"nodes": record.nodes, "packages": part}


def read(values: Sequence[tuple[str, Any]]) -> list[NodeRecord]:
    """Return the records in the keys and ``values`` of a log; what is no record is left out."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for key, value in values:
        if key in NODE_KEYS and isinstance(value, dict):
            kinds = found.setdefault(str(value.get("nodes")), {})
            told = value.get("packages") if key == PACKAGES_KEY else value
            if isinstance(told, dict):
                kept = {str(name): str(text) for name, text in told.items() if name != "nodes"}
                kinds.setdefault(key, {}).update(kept)
    return [
        NodeRecord(
            nodes,
            kinds.get(NODES_KEY, {}),
            kinds.get(SOFTWARE_KEY, {}),
            kinds.get(PACKAGES_KEY, {}),
        )
        for nodes, kinds in found.items()
    ]


def num_nodes(record: NodeRecord) -> int:
    """Return the number of nodes of ``record``, 0 if its positions are none."""
    count = 0
    for part in record.nodes.split(","):
        if not (match := _POSITIONS.fullmatch(part)):
            return 0
        count += int(match[2] or match[1]) - int(match[1]) + 1
    return count


def _parts(installed: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield ``installed`` in parts that fit into a line each."""
    part: dict[str, str] = {}
    size = 0
    for name, each_version in installed.items():
        added = len(name) + len(each_version) + len('"": "", ')
        if part and size + added > _MAX_CHARACTERS:
            yield part
            part, size = {}, 0
        part[name] = each_version
        size += added
    if part:
        yield part


Facts = dict[str, str]  # by the names of MLCommons' system description; all values are strings

_GPU_DRIVERS = ("amdgpu", "nvidia")  # kernel modules
_PACKAGES = ("fluxtrain", "torch", "transformers", "safetensors", "numpy", "mlperf-logging")


def node_facts(ranks_per_node: int, root: Path = Path("/")) -> Facts:
    """Return the facts of this node alone, with drivers and network cards."""
    facts = machine_facts(ranks_per_node, ranks_per_node, root)
    del facts["number_of_nodes"], facts["other_software_stack"]
    drivers = {name: _read(root / f"sys/module/{name}/version").strip() for name in _GPU_DRIVERS}
    if drivers := {name: version for name, version in drivers.items() if version}:
        facts["accelerator_driver"] = ", ".join(f"{name} {drivers[name]}" for name in drivers)
    cards = Counter([*_network_cards(root), *_infiniband(root)])
    if cards:
        facts["network_cards"] = ", ".join(f"{count} x {name}" for name, count in cards.items())
    return facts


def machine_facts(num_ranks: int, ranks_per_node: int, root: Path = Path("/")) -> Facts:
    """Return the facts of this node, assuming equal nodes; ``root`` is the parent of /proc and /sys."""
    import torch

    return {
        "number_of_nodes": str(-(-num_ranks // ranks_per_node)),
        **_processors(root),
        **_memory(root),
        **_accelerators(ranks_per_node),
        "framework": f"PyTorch {torch.__version__}",
        "operating_system": _operating_system(root),
        "other_software_stack": ", ".join(_software()),
    }


def node_mark(root: Path = Path("/")) -> str:
    """Return a mark of this node: that of its kernel since the last boot, in containers too."""
    boot = _read(root / "proc/sys/kernel/random/boot_id").strip() or platform.node()
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


def _processors(root: Path) -> Facts:
    records = [_pairs(text) for text in _read(root / "proc/cpuinfo").split("\n\n") if text.strip()]
    sockets = {record.get("physical id", "0") for record in records}
    cores = {(r.get("physical id", "0"), r.get("core id", str(i))) for i, r in enumerate(records)}
    facts = {
        "host_processors_per_node": str(len(sockets)),
        "host_processor_model_name": next((r.get("model name", "") for r in records), "")
        or platform.machine(),
        "host_processor_core_count": str(len(cores) // max(1, len(sockets))),
        "host_processor_vcpu_count": str(len(records) or os.cpu_count() or 1),
    }
    highest = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if highest.isdigit():
        facts["host_processor_frequency"] = f"{int(highest) / 1e6:.2f} GHz"
    if caches := ", ".join(_caches(root)):
        facts["host_processor_caches"] = caches
    return facts


def _caches(root: Path) -> Iterable[str]:
    for folder in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(folder / name).strip() for name in ("level", "type", "size"))
        if level and size:
            yield f"L{level} {kind.lower()} {size}"


def _memory(root: Path) -> Facts:
    match = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"))
    return {"host_memory_capacity": f"{int(match[1]) / 2**20:.0f} GiB"} if match else {}


def _accelerators(ranks_per_node: int) -> Facts:
    import torch

    if not torch.cuda.is_available():
        return {"accelerators_per_node": "0", "accelerator_model_name": "none"}
    device = torch.cuda.get_device_properties(0)
    return {
        "accelerators_per_node": str(ranks_per_node),
        "accelerator_model_name": device.name,
        "accelerator_memory_capacity": f"{device.total_memory / 2**30:.0f} GiB",
    }


def _network_cards(root: Path) -> Iterable[str]:
    """Yield driver and speed of each network card; virtual interfaces have no device."""
    for folder in sorted((root / "sys/class/net").glob("*")):
        driver = folder / "device/driver"
        if driver.exists():
            speed = _read(folder / "speed").strip()  # in Mb/s; -1 or an error if the link is down
            rate = f"{int(speed) / 1000:g} Gb/s" if speed.isdigit() else "link down"
            yield f"{driver.resolve().name} {rate}"


def _infiniband(root: Path) -> Iterable[str]:
    """Yield kind and rate of each port of RDMA cards."""
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        kind = _read(port.parents[1] / "hca_type").strip() or port.parents[1].name.rstrip(
            "0123456789_"
        )
        rate, layer = (_read(port / name).strip() for name in ("rate", "link_layer"))
        yield f"RDMA {kind} {layer} {rate.partition(' (')[0]}".strip()


def _operating_system(root: Path) -> str:
    release = _pairs(_read(root / "etc/os-release"), "=")
    name = release.get("PRETTY_NAME", "").strip('"') or platform.system()
    return f"{name}, kernel {platform.release()}"


def _software() -> Iterable[str]:
    import torch  # here, as a review reads facts without it

    yield f"Python {platform.python_version()}"
    if torch.version.hip:
        yield f"ROCm {torch.version.hip}"
    elif torch.cuda.is_available():
        yield f"CUDA {torch.version.cuda}"
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:  # a base image may have it without metadata
            continue


def _pairs(text: str, mark: str = ":") -> Facts:
    split = (line.partition(mark) for line in text.splitlines() if mark in line)
    return {name.strip(): value.strip() for name, _, value in split}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace", encoding="utf-8")
    except OSError:
        return ""


SOURCE = Path(__file__).parents[1]
"""The folder of fluxtrain's sources."""
_UNKNOWN = "unknown"
"""The revision of an image that was built without one."""
_GIT_SECONDS = 10.0
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_VARIABLE = "KUBERNETES_SERVICE_HOST"


def software_facts() -> dict[str, str]:
    """Return the versions of Python and fluxtrain, commit and digest of its sources, if in a container."""
    in_container = _CONTAINER_VARIABLE in os.environ or any(map(os.path.exists, _CONTAINER_FILES))
    return {
        "python": platform.python_version(),
        "fluxtrain": __version__,
        "revision": revision(SOURCE, os.environ),
        "source_sha256": source_digest(SOURCE),
        "container": "yes" if in_container else "no",
    }


def source_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files of ``folder``, without compiled ones."""
    digest = hashlib.sha256()
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    for path in sorted(path for path in paths if is_source(path)):
        content = (folder / path).read_bytes()
        digest.update(f"{path.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def is_source(path: Path) -> bool:
    """Return whether the relative ``path`` is of a source file: neither compiled nor hidden."""
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return not hidden and path.suffix != ".pyc"


def revision(folder: Path, environ: Mapping[str, str]) -> str:
    """Return the commit of the sources: the image's, or that of the checkout; empty if nobody knows it.

    ``+changes`` follows if files of the checkout differ from the commit.
    """
    if (given := environ.get(ENV_REVISION, _UNKNOWN)) != _UNKNOWN:
        return given
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit or not _git(folder, "ls-files", "--", str(folder / "__init__.py")):
        return ""  # no checkout, or of another project that only contains the installed package
    return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--", ".") else commit


def _git(folder: Path, *arguments: str) -> str:
    """Return git's output, empty if it fails or is not installed."""
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""


Event = tuple[str, object]  # key, value

SYSTEM_KEY = "fluxtrain_system"
"""Our own key for the hardware and software of a node; `fluxtrain mlperf package` reads it from the log."""

DIVISION_KEY = "fluxtrain_division"
"""Our own key for the rules of the closed division that a run breaks."""
DATA_KEY = "fluxtrain_data"
"""Our own key for the digests of the data sets' indices."""
CHAIN_KEY = "fluxtrain_chain"
"""Our own key for the id of the run in the chain of its log."""
RANKS_KEY = "fluxtrain_ranks"
"""Our own key for the ranks and the nodes that a run starts on."""

PRECISION_NAMES: dict[Precision, str] = {"bfloat16": "bfloat16", "float32": "fp32"}
"""The checker's names of our data types."""


@dataclass(frozen=True)
class RunFacts:
    """Values of the log that are not in the config: division of the work, size of the data sets, hardware."""

    config: RunConfig
    shares: BatchShares  # with the actual micro batch, not the config's maximum
    train_samples: int | None  # of one epoch; None: the data are opened after run_start
    eval_samples: int | None  # of the whole validation set
    started: float  # Unix time at which the launcher started
    machine: Mapping[str, str] = field(default_factory=dict)  # see machine.py
    nodes: Sequence[NodeRecord] = ()
    num_nodes: tuple[int, int] = (1, 1)  # the fewest and the most that the run may have
    flushed: float | None = None  # Unix time when the last node had emptied its page cache
    node_marks: tuple[str, ...] = ()  # marks of the nodes, see machine.py
    pods: tuple[str, ...] = ()  # uids of the pods that the ranks are in

    @cached_property
    def violations(self) -> list[Violation]:
        """Return the rules of the closed division that the run breaks from its start."""
        return violations(self.config, self.num_nodes)

    @property
    def begins_closed(self) -> bool:
        return begins_closed(self.config, self.num_nodes)

    @property
    def ranks(self) -> dict[str, object]:
        return {"num_ranks": self.shares.num_ranks, "nodes": list(self.node_marks)}

    @property
    def evaluation_frequency(self) -> int:
        """Return the actual number of samples between two evaluations; 0 if there are none."""
        return self.config.evaluation_steps * self.config.schedule.global_batch_size


def init_events(facts: RunFacts) -> Iterator[Event]:
    """Yield the events between ``init_start`` and ``init_stop``, in an order that all rulesets accept.

    The division must come before ``init_stop`` (it sets the time limit of the initialisation) and, since
    6.1.0, the global batch size before the evaluation frequency (which is checked against it).
    """
    submitter = facts.config.logging.mlperf
    yield "submission_benchmark", "flux1"
    yield "submission_org", submitter.organization
    yield "submission_division", "closed" if facts.begins_closed else "open"
    if submitter.division == "auto" and facts.violations:
        yield DIVISION_KEY, division_value("open", facts.violations)
    yield "submission_status", submitter.status
    yield "submission_platform", submitter.platform
    yield from _work(facts)
    yield from _optimizer(facts.config)
    yield from _disclosure(facts)
    yield "seed", facts.config.drawn_seed
    if facts.machine:
        yield SYSTEM_KEY, dict(facts.machine)
    yield from events(facts.nodes)
    yield RANKS_KEY, facts.ranks


def division_value(division: str, broken: Iterable[Violation]) -> dict[str, object]:
    """Return the value of an event of DIVISION_KEY."""
    return {"division": division, "rules": [str(each) for each in broken]}


def _work(facts: RunFacts) -> Iterator[Event]:
    yield "global_batch_size", facts.config.schedule.global_batch_size
    yield "gradient_accumulation_steps", facts.shares.accumulation_steps
    if facts.train_samples is not None:
        yield "train_samples", facts.train_samples
        if claims_closed(facts.config):  # every evaluation covers the whole set, or ends the run
            yield "eval_samples", facts.eval_samples
    yield "evaluation_frequency", facts.evaluation_frequency
    yield "target_accuracy", facts.config.evaluation.target_loss


def _optimizer(config: RunConfig) -> Iterator[Event]:
    optim, schedule = config.optim, config.schedule
    yield "opt_name", optim.name
    yield "opt_adamw_beta_1", optim.beta1
    yield "opt_adamw_beta_2", optim.beta2
    yield "opt_adamw_epsilon", optim.epsilon
    yield "opt_adamw_weight_decay", optim.weight_decay
    yield "opt_base_learning_rate", optim.learning_rate
    yield "opt_learning_rate_warmup_steps", schedule.warmup_steps
    yield "opt_learning_rate_training_steps", schedule.steps
    yield "opt_learning_rate_decay_schedule", schedule.decay
    yield "opt_gradient_clip_norm", optim.max_grad_norm


def _disclosure(facts: RunFacts) -> Iterator[Event]:
    """Yield the keys that are mandatory since 6.1.0: precision, parallelism, config file."""
    precision = facts.config.precision
    compute = PRECISION_NAMES[precision.compute]
    # weights are gathered in the compute dtype, gradients reduced in the reduce dtype: the lower one
    both = {PRECISION_NAMES[precision.compute], PRECISION_NAMES[precision.reduce]}
    yield "lowest_numerical_precision_in_linear", compute if precision.fp8 == "none" else "fp8"
    yield "lowest_numerical_precision_in_attn", compute
    yield "lowest_numerical_precision_in_comm", "bfloat16" if "bfloat16" in both else "fp32"
    for axis in ("tensor", "pipeline", "context", "expert"):
        yield f"{axis}_parallelism", 1
    yield "micro_batch_size", facts.shares.micro_batch_size
    yield "config_filename", CONFIG_FILE


def all_flushed(world: World, environment: Mapping[str, str]) -> float | None:
    """Return the Unix time when the last node had flushed, None unless all have; every rank must call it."""
    own = [repr(flushed(environment))] if world.local_rank == 0 else []
    times = world.all_gather(own)
    return None if "None" in times else max(map(float, times))


def flushed(environment: Mapping[str, str]) -> float | None:
    """Return the Unix time when this node's caches were flushed, None if they were not."""
    name = environment.get(ENV_FLUSHED)
    try:
        text = Path(name).read_text(encoding="utf-8").strip() if name else ""
    except OSError:
        return None
    return float(text) if text.isascii() and text.isdecimal() else None
