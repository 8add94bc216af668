"""A run of the closed division without a fault, as events and a configuration that tests can break."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.data.order import BatchShares
from fluxtrain.mlperf.evidence import Run
from fluxtrain.mlperf.facts import NodeRecord, RunFacts, software_facts
from fluxtrain.mlperf.log import MLPerfLog
from fluxtrain.mlperf.log_lines import TOKEN, parse
from fluxtrain.runtime.installed import packages

EVERY = 262_144
SIZE = 512
CONVERGED = (27, 28, 28, 28, 28, 28, 29, 29, 29, 29)  # evaluations; the reference's mean is 27.6
SYSTEM = {
    "number_of_nodes": "2",
    "host_processors_per_node": "2",
    "host_processor_core_count": "64",
    "accelerators_per_node": "8",
    "accelerator_model_name": "AMD Instinct MI300X",
    "framework": "PyTorch 2.15.0",
}
NODE = NodeRecord(
    "0-1",
    {"accelerators_per_node": "8", "accelerator_driver": "amdgpu 6.12.12"},
    {**software_facts(), "revision": "0123abcd", "container": "no"},
    packages(),
)
Event = dict[str, Any]


class Clock:
    """Unix time that advances by ``step`` with each call."""

    def __init__(self, start: float) -> None:
        self.now, self.step = start, 1.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@dataclass
class Evidence:
    """The parts of a run's evidence, to be changed."""

    events: list[Event]
    config: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    """Further lines with the token, in text."""

    def copy(self) -> Evidence:
        return copy.deepcopy(self)

    def run(self, name: str = "run") -> Run:
        texts = [TOKEN + json.dumps(event) for event in self.events] + self.texts
        lines = [parse(number, text) for number, text in enumerate(texts, 1)]
        return Run(name, Path(name), lines, self.config)

    def all(self, key: str) -> list[Event]:
        return [event for event in self.events if event["key"] == key]

    def one(self, key: str, number: int = 0) -> Event:
        return self.all(key)[number]

    def at(self, key: str, number: int = 0) -> int:
        """Return the index of an event in the log."""
        return self.events.index(self.one(key, number))


def loss_after(count: int) -> float:
    """Return a loss such as published ones after evaluations at small batches; above the target."""
    return 0.5861 + 0.13 / float(count) ** 1.3


def write_log(
    path: Path, seed: int, evaluations: int, reached: bool = True, **changes: Any
) -> dict[str, Any]:
    """Write the log of a run of ``evaluations`` as the trainer does; return its configuration."""
    base = {
        "preset": "mlperf-schnell",
        "seed": seed,
        "schedule": {"global_batch_size": SIZE},
        "logging": {"mlperf": {"organization": "example-org", "platform": "8xMI300X"}},
    }
    config = resolve(merge(base, changes))
    clock = Clock(1_700_000_000.0 + 1e6 * seed)
    facts = RunFacts(
        config, BatchShares(SIZE, 32, 16), 1_099_776, 29_696, clock.now, SYSTEM, [NODE]
    )
    log = MLPerfLog.open(path, 0, False, facts, clock)
    log.ready()
    for count in range(1, evaluations + 1):
        samples = count * EVERY
        clock.step = 0.0
        log.block_start(samples - EVERY)
        clock.step = 2900.0
        log.block_stop(samples)
        clock.step = 0.0
        log.eval_start(samples)
        clock.step = 100.0
        noise = (seed * 7919 + count * 104_729) % 1000 / 1e6  # each run has a curve of its own
        log.eval_accuracy(
            samples, 0.585 if reached and count == evaluations else loss_after(count) + noise
        )
        clock.step = 0.0
        log.eval_stop(samples)
    clock.step = 600.0
    log.run_stop("success" if reached else "aborted", evaluations * EVERY)
    log.close()
    path.write_text(
        path.read_text().replace('"cache_clear", "value": false', '"cache_clear", "value": true')
    )
    dumped: dict[str, Any] = json.loads(config.model_dump_json())
    return dumped


def write_run(
    folder: Path, seed: int, evaluations: int = 27, reached: bool = True, **changes: Any
) -> Path:
    """Write log and configuration of a run as the trainer does, into a new folder."""
    folder.mkdir(parents=True)
    config = write_log(folder / "mlperf.log", seed, evaluations, reached, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def good_run(folder: Path, seed: int = 7, evaluations: int = 4, **changes: Any) -> Evidence:
    path = folder / f"good_{seed}.log"
    config = write_log(path, seed, evaluations, **changes)
    lines = path.read_text().splitlines()
    return Evidence([json.loads(line.removeprefix(TOKEN)) for line in lines], config)


def published(size: int, evaluations: int) -> Iterator[Event]:
    """Yield events in the form of submitters' published logs.

    One cache_clear per node, the literal 262144 as frequency at every batch size, blocks with their length,
    steps in the metadata, statistics of their own, also after the end.
    """
    every = -(-EVERY // size) * size
    time = 1_700_000_000_000
    for node in range(18):
        yield _event("cache_clear", True, time - 15_000 + node * 7 % 5)
    yield _event("init_start", None, time)
    settings = {
        "submission_benchmark": "flux1",
        "submission_org": "example-org",
        "submission_division": "closed",
        "submission_status": "onprem",
        "submission_platform": "18xNODE",
        "target_accuracy": 0.586,
        "global_batch_size": size,
        "train_samples": 1_099_776,
        "eval_samples": 29_696,
        "evaluation_frequency": EVERY,
        "gradient_accumulation_steps": 1,
        "opt_learning_rate_training_steps": -1,
        "seed": 26_285,
    }
    for key, value in settings.items():
        yield _event(key, value, time)
    time += 162_000
    yield _event("tracked_stats", {"warmup_time": 162.5}, time, step=0)
    yield _event("init_stop", None, time)
    yield _event("run_start", None, time)
    for number in range(evaluations):
        step, next_step = number * every // size, (number + 1) * every // size
        yield _event("block_start", None, time, samples_count=every, step=step)
        time += 58_000
        yield _event(
            "tracked_stats", {"train_loss": 0.8}, time, samples_count=number * every + 10 * size
        )
        yield _event("block_stop", None, time, samples_count=every, step=next_step)
        samples = (number + 1) * every
        yield _event("eval_start", None, time, samples_count=samples, step=next_step)
        time += 2_200
        loss = 0.5859 if number + 1 == evaluations else loss_after(number + 1)
        yield _event("eval_accuracy", loss, time, samples_count=samples)
        yield _event("tracked_stats", {"validation_time": 2.2}, time, step=next_step)
        yield _event("eval_stop", None, time, samples_count=samples, step=next_step)
    stop = {"samples_count": evaluations * every, "status": "success"}
    yield _event("run_stop", None, time, **stop)
    yield _event("time_to_train_minutes", 45.5, time + 5)
    yield _event(
        "throughput_samples_per_second", 4200.0, time + 8, samples_count=evaluations * every
    )


def complete(size: int, evaluations: int, **changed: object) -> list[Event]:
    """Return events as `published` with the optimizer's keys, which ruleset 5.1.0 needs."""
    events = list(published(size, evaluations))
    at = next(n for n, event in enumerate(events) if event["key"] == "seed")
    keys = {"opt_name": "adamw", "opt_adamw_beta_1": 0.9, "opt_adamw_beta_2": 0.95}
    keys |= {"opt_adamw_epsilon": 1e-08, "opt_adamw_weight_decay": 0.1}
    keys |= {"opt_gradient_clip_norm": 1.0, "opt_base_learning_rate": 2e-4}
    keys |= {"opt_learning_rate_warmup_steps": 0}
    events[at:at] = [events[at] | {"key": key, "value": value} for key, value in keys.items()]
    return [
        event | {"value": changed[event["key"]]} if event["key"] in changed else event
        for event in events
    ]


def _event(key: str, value: object, time_ms: int, **metadata: object) -> Event:
    return {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
        "metadata": {"file": "train.py", "lineno": 1, **metadata},
    }


Break = Callable[[Evidence], object]


def by_rule(table: Mapping[str, Mapping[str, object]], *more: object) -> list[Any]:
    """Return change, rule and ``more`` for each row of ``table``: changes by their names, by rules."""
    return [
        pytest.param(change, rule, *more, id=name)
        for rule, rows in table.items()
        for name, change in rows.items()
    ]


def value(key: str, given: Any, number: int = 0) -> Break:
    """Change the value of an event."""
    return lambda run: run.one(key, number).update(value=given)


def meta(key: str, name: str, given: Any, number: int = 0) -> Break:
    """Change the metadata of an event."""
    return lambda run: run.one(key, number)["metadata"].update({name: given})


def later(key: str, milliseconds: int, number: int = 0) -> Break:
    """Move the clock from an event on."""

    def change(run: Evidence) -> None:
        for event in run.events[run.at(key, number) :]:
            event["time_ms"] += milliseconds

    return change
