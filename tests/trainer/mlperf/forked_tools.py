"""MLCommons' tools in forks of the test process, which has already imported what they import."""

from __future__ import annotations

import logging
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn


def run_tool(name: str, arguments: Sequence[str], folder: Path | None = None) -> tuple[int, str]:
    """Run the tool ``name`` as :func:`fluxtrain.mlperf.compliance.run_tool` does, without its imports."""
    main = "mlp_compliance" if name == "compliance_checker" else name
    import_module(f"mlperf_logging.{name}.{main}")
    files = [os.memfd_create(stream) for stream in ("stdout", "stderr")]
    child = os.fork()
    if child == 0:
        _run(f"mlperf_logging.{name}", arguments, folder or Path.cwd(), files)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output = [os.pread(file, os.fstat(file).st_size, 0) for file in files]
    for file in files:
        os.close(file)
    return code, b"\n".join(output).decode("utf-8", "replace")


def _run(module: str, arguments: Sequence[str], folder: Path, files: list[int]) -> NoReturn:
    """Run ``module`` as a program with its stdout and stderr in ``files``, and exit."""
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    logging.root.handlers.clear()
    warnings.simplefilter("ignore")
    os.chdir(folder)
    sys.argv = [module, *arguments]
    code: object = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exited:
        code = exited.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
