"""A library in place of CUDA's driver, in which a machine without a GPU has an H200 that computes nothing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from benchmarks.peers import ROOT

_SOURCE = Path(__file__).with_name("stub.c")
FOLDER = ROOT / "build" / "cuda_code"


def load() -> None:
    """Build the stub and load it, before torch: what is loaded first answers torch's calls."""
    if "torch" in sys.modules:
        raise RuntimeError("the stub must be loaded before torch")
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        raise RuntimeError("Triton is missing, whose package has CUDA's headers")
    of_triton = Path(spec.origin).parent / "backends/nvidia/include"
    of_torch = of_triton.parents[3].glob("nvidia/cu*/include")
    headers = [f"-I{each}" for each in (*of_torch, of_triton)]  # Triton's may be older
    library = FOLDER / "libcuda.so.1"  # Triton and torch open the driver by this name
    FOLDER.mkdir(parents=True, exist_ok=True)
    options = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}", *headers]
    subprocess.run(["gcc", *options, "-o", library, _SOURCE], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # others would compile what is only counted


def complete() -> None:
    """Let torch and Triton leave out what the stub does not answer, for the rest of the process."""
    import torch
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *_: None
    fake_tensor.init_gpu_context = _nothing  # 2.11 takes memory there
    # patterns for models that write attention out, which are traced on real tensors
    fuse_attention._sfdp_init = pad_mm._pad_mm_init = misc_patterns._misc_patterns_init = _nothing
    driver.set_active(
        mock.Mock(
            **{
                "get_current_target.return_value": GPUTarget("cuda", 90, 32),
                "get_active_torch_device.return_value": torch.device("cuda", 0),
                "get_current_device.return_value": 0,
                "get_current_stream.return_value": 0,
                "get_device_interface.return_value": torch.cuda,
            }
        )
    )


def _nothing(*_: object) -> None:
    pass
