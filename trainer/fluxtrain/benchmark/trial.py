"""The process of one rank of a trial: takes a few training steps, and ends with a code that says why.

It is started by the benchmark task with torchrun's variables, and reads its order from stdin as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from pathlib import Path

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.validation import validate
from fluxtrain.errors import EXIT_ERROR, EXIT_OK
from fluxtrain.files import atomic_write
from fluxtrain.numa import bind_near_gpu
from fluxtrain.progress import Progress
from fluxtrain.report.node_progress import publish

EXIT_OUT_OF_MEMORY = 12
"""Exit code of a process that had no memory left."""
FACTS_FILE = "facts.json"
"""What rank 0 of a trial writes about its device."""
_SIGNS = (
    *("out of memory", "can't allocate memory", "cannot allocate memory", "std::bad_alloc"),
    "can't start new thread",
)
"""Parts of the messages of torch's allocators, of collectives, and of Python without room for a stack."""


def main() -> int:
    """Take the steps of the order on stdin; return the exit code."""
    order = json.load(sys.stdin)
    if order["memory_bytes"]:
        _limit_memory(order["memory_bytes"])
    try:
        _take_steps(order)
        return EXIT_OK
    except BaseException as error:
        traceback.print_exc()
        return EXIT_OUT_OF_MEMORY if is_out_of_memory(error) else EXIT_ERROR


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` or one of its causes says that memory is short."""
    while error is not None:
        if isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _limit_memory(num_bytes: int) -> None:
    """Let this process, and each of its loaders, have at most ``num_bytes`` of data."""
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def _take_steps(order: dict[str, object]) -> None:
    progress = Progress()
    publish(progress)
    from fluxtrain.distributed import end_with_parent, process_group

    end_with_parent()
    bind_near_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    from fluxtrain.benchmark.facts import facts
    from fluxtrain.benchmark.mix import mixed_sources
    from fluxtrain.plan.resharding import settle_resharding_of
    from fluxtrain.train import take_steps

    config = validate(RunConfig, order["config"], "spec.run")
    paths = RunPaths.from_environment(os.environ)
    with process_group(progress) as world:
        config = settle_resharding_of(world, config)
        sources = mixed_sources(config, paths.data, int(str(order["turns"])))
        take_steps(config, paths, world, int(str(order["steps"])), sources)
        if world.is_main:
            with atomic_write(Path(paths.output) / FACTS_FILE) as partial:
                partial.write_text(json.dumps(facts(config, world)))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not through destructors, which may wait for other ranks
