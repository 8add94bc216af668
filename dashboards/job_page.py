"""The dashboard of a job: loss, speed, health and GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from dashboards.grafana import (
    Dashboard,
    Panel,
    Query,
    Row,
    Variable,
    curve,
    quantiles,
    stacked,
    stat,
)
from fluxtrain.report.metrics import STEP_METRICS

_JOB = '{namespace="$namespace", fluxtraining="$job"}'
_LOST = '{namespace="$namespace", fluxtraining="$job", part!="step"}'
_UP = "fluxtrain_last_progress_timestamp_seconds"
"""A metric that every trainer reports from its start."""
_PODS = f"group by (namespace, pod) ({_UP}{_JOB})"
_PHASES = f"rate(fluxtrain_phase_seconds_total{_JOB}[$__rate_interval])"


def _max(metric: str) -> str:
    """Return a query of a gauge that has the same value in all pods, or is not yet set in some."""
    return f"max(fluxtrain_{metric}{_JOB})"


def _of_steps(group: str) -> Iterator[Panel]:
    """Yield the curves of ``group`` that the trainer's table of metrics has."""
    for each in STEP_METRICS:
        if each.group == group and each.curve is not None:
            title, legend, unit = each.curve
            yield curve(title, each.text, Query(_max(each.gauge), legend), unit=unit)


def _rate_by_pod(counter: str) -> Query:
    return Query(f"max by (pod) (rate(fluxtrain_{counter}{_JOB}[$__rate_interval]))", "{{pod}}")


def _slowest(metric: str) -> Query:
    of_ranks = f"max by (pod, rank) (fluxtrain_{metric}{_JOB})"
    return Query(f"topk(5, {of_ranks})", "{{pod}} rank {{rank}}")


def _median(metric: str) -> Query:
    return Query(f"quantile(0.5, fluxtrain_{metric}{_JOB})", "median")


def _gpu(metric: str) -> Query:
    """Return a query of AMD's device metrics exporter for the GPUs of the job's pods."""
    of_job = f'{metric}{{namespace="$namespace"}} * on (namespace, pod) group_left () {_PODS}'
    return Query(f"max by (pod, gpu_id) ({of_job})", "{{pod}} GPU {{gpu_id}}")


JOB = Dashboard(
    uid="fluxtrain-job",
    title="fluxtrain / job",
    text="One FluxTraining.",
    variables=(
        Variable("namespace", "Namespace", f"label_values({_UP}, namespace)"),
        Variable("job", "Job", f'label_values({_UP}{{namespace="$namespace"}}, fluxtraining)'),
    ),
    parts=(
        stat("Step", "Optimizer steps done.", _max("step")),
        stat("Train loss", "Of the last logged step.", _max("train_loss")),
        stat("Evaluation loss", "Of the last evaluation.", _max("eval_loss")),
        stat("Samples/s", "Of all ranks together.", _max("samples_per_second")),
        stat("MFU", "Model FLOPs over the GPUs' dense peak.", _max("mfu_ratio"), "percentunit"),
        stat("Remaining", "Estimated time to the last step.", _max("remaining_seconds"), "s"),
        stat(
            "Since the last step",
            "Grows while nothing is trained.",
            f"time() - max({_UP}{_JOB} > 0)",
            "s",
        ),
        stat(
            "Restarts",
            "Of the processes, in the time shown, as the pod with the most of them saw it.",
            f"max(changes(fluxtrain_step_seconds_created{_JOB}[$__range]))",
        ),
        Row("Learning"),
        curve(
            "Loss",
            "Training and evaluation.",
            Query(_max("train_loss"), "train"),
            Query(_max("eval_loss"), "evaluation"),
        ),
        curve(
            "Evaluation loss by timestep",
            "Early timesteps are nearly clean, late ones nearly noise.",
            Query(f"max by (timestep) (fluxtrain_eval_loss_by_timestep{_JOB})", "{{timestep}}"),
        ),
        curve(
            "Samples to the target",
            "Forecast by the last evaluations; MLPerf's benchmark: 95 % of the reference's runs lie between.",
            Query(_max("target_samples"), "forecast"),
            Query(_max("reference_samples_low"), "reference, low"),
            Query(_max("reference_samples_high"), "reference, high"),
            Query(_max("samples"), "now"),
        ),
        *_of_steps("optimizer"),
        Row("Speed"),
        *_of_steps("speed"),
        curve(
            "Step time",
            "Evaluation and sampling left out.",
            *quantiles("fluxtrain_step_seconds", _JOB),
            unit="s",
        ),
        curve(
            "Waiting for data",
            "Share of the time.",
            _rate_by_pod("data_wait_seconds_total"),
            unit="percentunit",
        ),
        curve(
            "Slowest ranks",
            "Forward passes of a step without waits for other ranks: the five slowest, and the median.",
            _slowest("rank_compute_seconds"),
            _median("rank_compute_seconds"),
            unit="s",
        ),
        curve(
            "Slowest ranks in backward passes",
            "Backward passes of a step without waits for other ranks: the five slowest, and the median.",
            _slowest("rank_backward_seconds"),
            _median("rank_backward_seconds"),
            unit="s",
        ),
        curve(
            "Slowest ranks in optimizer steps",
            "The five slowest, and the median.",
            _slowest("rank_optimizer_seconds"),
            _median("rank_optimizer_seconds"),
            unit="s",
        ),
        curve(
            "Ranks that wait for data",
            "Wait per step: the five longest, and the median.",
            _slowest("rank_data_wait_seconds"),
            _median("rank_data_wait_seconds"),
            unit="s",
        ),
        curve(
            "Waiting for checkpoints",
            "Share of the time.",
            _rate_by_pod("checkpoint_stall_seconds_total"),
            unit="percentunit",
        ),
        curve(
            "Phases",
            "Share of the time of all nodes, by what their first rank does.",
            Query(
                f"sum by (phase) ({_PHASES}) / scalar(count(count by (pod) ({_PHASES})))",
                "{{phase}}",
            ),
            unit="percentunit",
        ),
        curve(
            "Without progress",
            "Of the time that its phase allows, of the rank with the least. At 100 % the job has stalled.",
            Query(
                f"min(fluxtrain_since_progress_seconds{_JOB} / fluxtrain_stall_limit_seconds{_JOB})",
                "least",
            ),
            unit="percentunit",
        ),
        curve(
            "Waiting for snapshots",
            "Share of the time; at most 1 %.",
            _rate_by_pod("snapshot_stall_seconds_total"),
            unit="percentunit",
        ),
        curve(
            "Memory of snapshots",
            "Of all ranks, copies for other nodes included.",
            Query(f"sum(fluxtrain_snapshot_bytes{_JOB})", "snapshots"),
            unit="bytes",
        ),
        curve(
            "Ranks without snapshots",
            "They take none for now, as memory is short.",
            Query(f"sum(fluxtrain_snapshots_paused{_JOB})", "ranks"),
        ),
        curve(
            "Memory",
            "Most that was allocated on the first device of each pod.",
            Query(f"max by (pod) (fluxtrain_memory_bytes{_JOB})", "{{pod}}"),
            Query(f"max by (pod) (fluxtrain_memory_reserved_bytes{_JOB})", "{{pod}} reserved"),
            unit="bytes",
        ),
        Row("Health"),
        curve("Nodes", "Pods that train and answer.", Query(f"count({_PODS})", "nodes")),
        curve(
            "Restarts",
            "Of the processes, within ten minutes.",
            Query(f"max by (pod) (changes(fluxtrain_step_seconds_created{_JOB}[10m]))", "{{pod}}"),
        ),
        curve(
            "Steps since the last checkpoint",
            "Lost if all pods end now; and the steps that a crashed process or a replaced node loses.",
            Query(f"{_max('step')} - {_max('checkpoint_step')}", "checkpoint"),
            Query(f"{_max('step')} - {_max('snapshot_step')}", "snapshot"),
        ),
        stat(
            "Goodput",
            "Share of the job's time that was spent on steps that count; until the job has finished.",
            f"max(fluxtrain_operator_goodput_ratio{_JOB})",
            "percentunit",
            width=8,
        ),
        stacked(
            "Lost time",
            "Not spent on steps that count, by cause: since the job's start, without suspensions.",
            Query(f"max by (part) (fluxtrain_operator_spent_seconds{_LOST})", "{{part}}"),
            unit="s",
        ),
        curve(
            "Unreadable samples",
            "Skipped and counted; those of one pod's first rank.",
            Query(f"max by (pod) (fluxtrain_bad_samples_total{_JOB})", "{{pod}}"),
        ),
        curve("Learning rate", "Of the schedule.", Query(_max("learning_rate"), "rate")),
        curve("Samples", "Used so far.", Query(_max("samples"), "samples")),
        Row("GPUs, by AMD's device metrics exporter"),
        curve("Activity", "Of the compute units.", _gpu("gpu_gfx_activity"), unit="percent"),
        curve("Power", "Of the package.", _gpu("gpu_package_power"), unit="watt"),
        curve(
            "Junction temperature",
            "Hottest spot.",
            _gpu("gpu_junction_temperature"),
            unit="celsius",
        ),
    ),
)
