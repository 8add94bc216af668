"""The events of the MLPerf log before a run starts: MLCommons' keys and their actual values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fluxtrain.contract.launch import CONFIG_FILE
from fluxtrain.contract.run.closed_division import (
    Violation,
    begins_closed,
    claims_closed,
    violations,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.encoders import Precision
from fluxtrain.data.order import BatchShares
from fluxtrain.mlperf.node_records import NodeRecord
from fluxtrain.mlperf.node_records import events as node_events

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
        """Return whether the log begins in the closed division."""
        return begins_closed(self.config, self.num_nodes)

    @property
    def ranks(self) -> dict[str, object]:
        """Return the ranks and nodes of this start."""
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
    yield from _submission(facts)
    yield from _work(facts)
    yield from _optimizer(facts.config)
    yield from _disclosure(facts)
    yield "seed", facts.config.drawn_seed
    if facts.machine:
        yield SYSTEM_KEY, dict(facts.machine)
    yield from node_events(facts.nodes)
    yield RANKS_KEY, facts.ranks


def _submission(facts: RunFacts) -> Iterator[Event]:
    submitter = facts.config.logging.mlperf
    yield "submission_benchmark", "flux1"
    yield "submission_org", submitter.organization
    yield "submission_division", "closed" if facts.begins_closed else "open"
    if submitter.division == "auto" and facts.violations:
        yield DIVISION_KEY, division_value("open", facts.violations)
    yield "submission_status", submitter.status
    yield "submission_platform", submitter.platform


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
