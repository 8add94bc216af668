"""Compilation of the blocks with torch.compile: whether this machine can, and how."""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluxtrain.contract.process import COMPILED_FOLDER, ENV_RENDEZVOUS_KEY
from fluxtrain.contract.run.config import Kernel, ParallelConfig, RunConfig
from fluxtrain.errors import ConfigError
from fluxtrain.model.flux import Flux
from fluxtrain.model.fp8 import Fp8Linear
from fluxtrain.runtime.files import atomic_write_by_several

BACKEND = "inductor"
"""Torch's compiler of graphs."""
_MOST_READS = {"realize_reads_threshold": 8}
"""With inductor's default, 4, a block in fp8 stores its modulated input in float32; with more, its readers
compute it from the stream, which is read twice instead."""
_CODE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_OLDEST_OF_TRITON = (7, 0)
_BFLOAT16 = (8, 0)
_HEADS = (16, 32, 64, 128)
"""Widths of heads that the blocks' kernels have tiles for."""
_MOST_GRAPHS = 64
"""Graphs of a kind of block, of which torch allows 8: more end the run."""


def compile_blocks(model: Flux, has_sizes: bool = False) -> None:
    """Compile each block separately: equal blocks share one compiled graph.

    It is of one shape; if batches have several sizes, of all: each would take a minute otherwise. Then there
    may be a few more, as for a single sample, or as many image tokens as text tokens.
    """
    if has_sizes:
        torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    for block in model.blocks:
        compile_module(block, has_sizes)


def compile_module(module: nn.Module, has_sizes: bool = False) -> None:
    """Compile ``module`` when it is called, whole; for each shape, or all if it ``has_sizes``."""
    in_fp8 = any(isinstance(each, Fp8Linear) for each in module.modules())
    is_double = in_fp8 and not hasattr(module, "linear1")
    options = _MOST_READS if in_fp8 and not is_double else None
    backend = _double_in_fp8 if is_double and BACKEND == "inductor" else BACKEND
    module.compile(fullgraph=True, dynamic=has_sizes, backend=backend, options=options)


def _double_in_fp8(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Compile with `_MOST_READS` in the forward pass only: the backward pass would move more."""
    from torch._inductor import compile_fx, config  # a second

    def compile_one(*what: Any, **how: Any) -> Any:
        with config.patch({} if how.get("is_backward") else _MOST_READS):
            return compile_fx.compile_fx_inner(*what, **how)

    return compile_fx.compile_fx(graph, inputs, inner_compile=compile_one)


def compiles(parallel: ParallelConfig, device: torch.device) -> bool:
    """Return whether the blocks are compiled on ``device``.

    Raises ConfigError if ``parallel.compile`` is true, and this machine lacks a compiler.
    """
    missing = missing_compiler(device)
    if parallel.compile and missing is not None:
        reason = f"{missing} on this machine; mend that, or set this to false"
        raise ConfigError("spec.run.parallel.compile", True, reason)
    return parallel.compiles(has_gpu=device.type == "cuda") and missing is None


def missing_compiler(device: torch.device) -> str | None:
    """Return what torch.compile needs for ``device`` and this machine lacks, None if it lacks nothing."""
    folder = Path(os.environ.get(_CODE_FOLDER) or gettempdir()).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        return (
            f"{folder}, for compiled code, is mounted noexec ({_CODE_FOLDER} names another folder)"
        )
    if device.type == "cuda":
        if find_spec("triton") is None:
            return "Triton is missing"
        has_gpu = torch.cuda.is_available()
        if has_gpu and torch.cuda.get_device_capability(device) < _OLDEST_OF_TRITON:
            return "a GPU of compute capability 7.0 is missing"
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # as Triton does
        text = f"a C compiler ({' or '.join(names)}) is missing"
        return None if any(map(shutil.which, names)) else text
    name = os.environ.get("CXX", "g++")  # as torch does
    return None if shutil.which(name) else f"the C++ compiler {name} is missing"


def kernels_on(device: torch.device, config: RunConfig) -> list[Kernel]:
    """Return the parts of a step that kernels of our own compute on ``device``: those named that can."""
    reasons, named = _without_kernels(device, config), config.parallel.kernels
    able = [name for name in get_args(Kernel) if name not in reasons]
    return able if named is None else [name for name in able if name in named]


def resolve_kernels(config: RunConfig, device: torch.device) -> RunConfig:
    """Return ``config`` with the ``parallel.kernels`` that compute on ``device``.

    Raises ConfigError if it names one that cannot.
    """
    kernels = kernels_on(device, config)
    for name in config.parallel.kernels or ():
        if name not in kernels:
            reason = f"{_without_kernels(device, config)[name]}; leave it out"
            raise ConfigError("spec.run.parallel.kernels", name, reason)
    parallel = config.parallel.model_copy(update={"kernels": kernels})
    return config.model_copy(update={"parallel": parallel})


def _without_kernels(device: torch.device, config: RunConfig) -> dict[Kernel, str]:
    """Return why kernels of our own do not compute parts of a step on ``device``."""
    if not compiles(config.parallel, device) or device.type != "cuda":
        return dict.fromkeys(get_args(Kernel), "it needs a GPU, and compiled blocks")
    model, precision, reasons = config.model, config.precision, dict[Kernel, str]()
    width = model.hidden_size // model.num_heads
    if precision.compute != "bfloat16" or torch.cuda.get_device_capability(device) < _BFLOAT16:
        reasons["blocks"] = "it needs bfloat16 and a GPU that computes in it"
    elif width not in _HEADS or int(model.hidden_size * model.mlp_ratio) % width:
        reasons["blocks"] = (
            f"heads of {width} channels are none of {_HEADS}, or do not divide the MLP"
        )
    in_bfloat16 = config.adapter is None and precision.weights == "bfloat16"
    if in_bfloat16 or not config.optim.kind.has_kernel:
        reasons["optimizer"] = "it needs optim.name adamw, and weights in float32"
    return reasons


# What torch.compile has made, kept in the output of a job: a pod that replaces another does not
# repeat it.
#
# There is one file for each kind of machine and each GPU of a node, as code names its GPU. Its name
# has the versions of all that the code depends on; torch looks entries up by its own source, the
# graph and its options besides.
#
# Torch unpickles entries. So a file is signed with the key of the job, and one without that
# signature is not used. `fluxtrain run` has no such key, and torch's cache in the folder for
# temporary files.


_SIGNATURE_BYTES = hashlib.sha256().digest_size
_MAX_BYTES = 1 << 30


class CompileCache:
    """The file of one rank's device."""

    def __init__(self, output: Path, device: torch.device, key: bytes) -> None:
        """Name the file in ``output``; nothing is read. ``key`` is the job's."""
        self.path = output / COMPILED_FOLDER / f"{_machine(device)}-{device.index or 0}.bin"
        self._key = key

    @staticmethod
    def of(
        output: Path, device: torch.device, environment: Mapping[str, str]
    ) -> CompileCache | None:
        """Return the file of a job in ``output``, None if ``environment`` names no key of a job."""
        if ENV_RENDEZVOUS_KEY not in environment:
            return None
        return CompileCache(output, device, Path(environment[ENV_RENDEZVOUS_KEY]).read_bytes())

    def load(self) -> bool:
        """Give the entries of the file to torch; return whether it has the signature of the job."""
        try:
            with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                content = file.read(_MAX_BYTES)
        except OSError:
            return False  # there is none yet
        signature, entries = content[:_SIGNATURE_BYTES], content[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(entries)):
            text = "not signed by this job, or damaged: not used"
            print(f"fluxtrain: {self.path}: {text}", file=sys.stderr, flush=True)
            return False
        return torch.compiler.load_cache_artifacts(entries) is not None

    def save(self) -> None:
        """Write what this process has compiled; nothing if the storage does not take it."""
        made = torch.compiler.save_cache_artifacts()
        if made is None or len(made[0]) > _MAX_BYTES - _SIGNATURE_BYTES:
            return
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            with atomic_write_by_several(self.path) as partial:
                partial.write_bytes(self._sign(made[0]) + made[0])

    def _sign(self, entries: bytes) -> bytes:
        return hmac.digest(self._key, self.path.name.encode() + entries, "sha256")


def _machine(device: torch.device) -> str:
    """Return a digest of the versions and the hardware that code depends on."""
    facts = [
        torch.__version__,
        torch.version.git_version,
        torch.version.cuda,
        torch.version.hip,
        _version("triton"),
        _version("fluxtrain"),
        platform.python_version(),
        *platform.libc_ver(),
        platform.machine(),
        device.type,
    ]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts += [properties.name, getattr(properties, "gcnArchName", None)]
    else:  # torch's own keys lack the instruction set that it compiles for
        facts += [torch.backends.cpu.get_cpu_capability(), *_features()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _features() -> list[str]:
    """Return the features of this processor that torch knows; none before torch 2.11."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return sorted(f"{name}={value}" for name, value in capabilities.items())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# Which of torch's implementations of attention is used: torch chooses, or the config names one.
#
# Torch's switches are the process's. They are set as long as a run lasts: blocks are traced for the
# compiler, and recomputed in backward passes, in threads of torch's own.


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Torch's backends by the names of ``spec.run.parallel.attention``."""
_NAMES = {backend: name for name, backend in BACKENDS.items()}


def attention_backend(name: str) -> AbstractContextManager[None]:
    """Return a context in which attention uses the backend ``name`` only, any for ``auto``."""
    return nullcontext() if name == "auto" else sdpa_kernel(BACKENDS[name])


def attention_on(device: torch.device, config: RunConfig) -> str:
    """Return the name of what computes attention on ``device``; on ROCm with its library.

    Raises ConfigError if ``device`` lacks what ``config`` names, or it cannot compute the run's shapes.
    """
    name = config.parallel.attention
    found, reason = _choice(name, device, config)
    if found == SDPBackend.ERROR:
        usable = [each for each in BACKENDS if _choice(each, device, config)[0] == BACKENDS[each]]
        text = f"{_described(device)} cannot compute it so{reason}; use {', '.join(usable)} or auto"
        raise ConfigError("spec.run.parallel.attention", name, text)
    is_rocm = device.type == "cuda" and torch.version.hip is not None
    library = f" ({_rocm_library()})" if is_rocm and found == BACKENDS["flash"] else ""
    return _NAMES.get(found, found.name.lower()) + library


def _choice(name: str, device: torch.device, config: RunConfig) -> tuple[SDPBackend, str]:
    """Return torch's choice for the run's shapes if ``name`` is enabled; ERROR and why if there is none."""
    model, tokens = config.model, config.image_tokens + config.data.text_length
    shape = 1, model.num_heads, tokens, model.hidden_size // model.num_heads
    dtype: torch.dtype = getattr(torch, config.precision.compute)
    queries = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    with attention_backend(name), warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            found = SDPBackend(torch._fused_sdp_choice(queries, queries, queries))
        except RuntimeError:
            found = SDPBackend.ERROR
    return found, "".join(f" ({reason.message})" for reason in reasons[:1])


def _described(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def _rocm_library() -> str:
    """Return the library of flash attention: AOTriton, unless composable kernel (CK) is preferred."""
    preferred = str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2]
    return "CK" if preferred.lower() == "ck" else "AOTriton"
