"""The benchmark task: for each setting the largest micro batch, then speed and memory at several batches.

Every trial is a real training in processes of its own (crew.py). What was measured is not measured again.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from types import FrameType
from typing import NoReturn

from fluxtrain.benchmark.crew import Crew
from fluxtrain.benchmark.report import write_report
from fluxtrain.benchmark.results import Results
from fluxtrain.benchmark.study import Study
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.progress import FINISH
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.errors import FluxtrainError, StoppedError
from fluxtrain.report.endpoint import Endpoint
from fluxtrain.signals import handled


def benchmark(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Measure every setting of ``config.benchmark`` on all ranks, and write the results to the output.

    Raises FluxtrainError if nothing could be measured, StoppedError after SIGTERM or SIGINT.
    """
    with ExitStack() as stack:
        endpoint = Endpoint(config, paths, world)
        if world.local_rank == 0:
            endpoint.start(stack)
        stack.enter_context(handled(_stop, signal.SIGTERM, signal.SIGINT))
        crew = Crew(config, paths, world, endpoint)
        if not world.is_main:
            crew.follow()
            return endpoint.set_phase(FINISH)
        results = Results(paths.output, config)

        def on_trial() -> None:
            endpoint.metrics.step.set(results.num_trials)
            endpoint.step_done(step=results.num_trials)

        Study(config, world, crew.run, results, on_trial).run()
        crew.dismiss()
        endpoint.set_phase(FINISH)
        print(write_report(config, paths.output, world.size, results.measured), flush=True)
        if not any(result.measurement for result in results.measured):
            raise FluxtrainError(_nothing(results))
        endpoint.progress.update(status="success")


def _nothing(results: Results) -> str:
    """Return why nothing was measured."""
    last = results.last
    why = f"; the last trial, {last.trial}, {last.ending}" if last else ""
    return f"nothing could be measured{why}"


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Stop at once: the process of a trial is killed with this one."""
    raise StoppedError("stopped; what was measured is kept, and the same command goes on")
