"""The dashboard of the operator: leadership, jobs, work and process."""

from __future__ import annotations

from dashboards.grafana import Dashboard, Query, Row, Variable, curve, quantiles, stat

_HERE = '{namespace="$namespace"}'
_PREFIX = "fluxtrain_operator"
_PODS = f"group by (namespace, pod) ({_PREFIX}_leader{_HERE})"
_LONG = "$__range"  # jobs start and recover too rarely for a rate over minutes


def _spent(parts: str) -> str:
    """Return a query of the time of all jobs, in the time shown, that was spent on ``parts``."""
    here = f'{{namespace="$namespace", part=~"{parts}"}}'
    return f"sum(increase({_PREFIX}_job_seconds_total{here}[$__range]))"


_LOST = _spent("redone|stalled")


def _rate(counter: str) -> Query:
    return Query(f"sum(rate({_PREFIX}_{counter}{_HERE}[$__rate_interval]))", "per second")


def _process(expr: str) -> Query:
    return Query(f"max by (pod) ({expr} * on (namespace, pod) group_left () {_PODS})", "{{pod}}")


OPERATOR = Dashboard(
    uid="fluxtrain-operator",
    title="fluxtrain / operator",
    text="The operator of FluxTraining.",
    variables=(Variable("namespace", "Namespace", f"label_values({_PREFIX}_leader, namespace)"),),
    parts=(
        stat("Leaders", "One, or nothing is reconciled.", f"sum({_PREFIX}_leader{_HERE})", width=4),
        stat("Replicas", "Replicas that are scraped.", f"count({_PREFIX}_leader{_HERE})", width=4),
        stat("Jobs", "Of all phases.", f"sum({_PREFIX}_jobs{_HERE})", width=4),
        stat("Queue", "Jobs that wait.", f"max({_PREFIX}_queue_length{_HERE})", width=4),
        stat(
            "Errors",
            "Failed reconciles in the time shown.",
            f"sum(increase({_PREFIX}_reconcile_errors_total{_HERE}[$__range]))",
            width=4,
        ),
        stat(
            "Pods created",
            "In the time shown.",
            f"sum(increase({_PREFIX}_pods_created_total{_HERE}[$__range]))",
            width=4,
        ),
        Row("Jobs"),
        curve(
            "Jobs by phase",
            "As the leader sees them.",
            Query(f"max by (phase) ({_PREFIX}_jobs{_HERE})", "{{phase}}"),
        ),
        curve(
            "Time to the first step",
            "From the creation of a job, over the time shown.",
            *quantiles(f"{_PREFIX}_time_to_first_step_seconds", _HERE, _LONG),
            unit="s",
        ),
        curve(
            "Recovery",
            "From the last step before a loss to the first one after it, over the time shown.",
            *quantiles(f"{_PREFIX}_recovery_seconds", _HERE, _LONG),
            unit="s",
        ),
        stat(
            "Goodput",
            "Share of the jobs' time that was spent on steps that count, over the time shown.",
            f"({_spent('step')} - {_LOST}) / ({_spent('.+')} - {_LOST})",
            "percentunit",
        ),
        curve(
            "Time of jobs",
            "By how it was spent; steps that are redone, and stalls, first count as steps.",
            Query(
                f"sum by (part) (rate({_PREFIX}_job_seconds_total{_HERE}[$__rate_interval]))",
                "{{part}}",
            ),
        ),
        curve(
            "Distrusted nodes",
            "Faults attributed to a node, halved every four hours; from 2.5 on new pods exclude it.",
            Query(f"max by (node) ({_PREFIX}_node_distrust{_HERE})", "{{node}}"),
        ),
        Row("Work"),
        curve(
            "Reconcile time",
            "Of one job.",
            *quantiles(f"{_PREFIX}_reconcile_seconds", _HERE),
            unit="s",
        ),
        curve("Reconciles", "All jobs.", _rate("reconcile_seconds_count"), unit="ops"),
        curve("Errors", "Each is retried.", _rate("reconcile_errors_total"), unit="ops"),
        curve("Unreadable objects", "Skipped, and logged.", _rate("unreadable_objects_total")),
        curve("Queue", "Jobs that wait.", Query(f"max({_PREFIX}_queue_length{_HERE})", "jobs")),
        curve("Pods created", "All jobs.", _rate("pods_created_total"), unit="ops"),
        curve(
            "API requests",
            "Those of watches and of the election left out.",
            Query(
                f"sum by (method, resource) (rate({_PREFIX}_api_requests_total{_HERE}[$__rate_interval]))",
                "{{method}} {{resource}}",
            ),
            unit="ops",
        ),
        curve(
            "Watches",
            "Time since the last event; nodes send one every few minutes.",
            Query(f"max by (kind) ({_PREFIX}_watch_age_seconds{_HERE})", "{{kind}}"),
            unit="s",
        ),
        curve(
            "Failing watches",
            "1 while the last list or watch failed; it is retried.",
            Query(
                f"max by (kind, resource_namespace) ({_PREFIX}_failing_watches{_HERE})",
                "{{kind}} {{resource_namespace}}",
            ),
        ),
        curve(
            "Namespaces of another operator",
            "Its Lease fluxtrain-jobs claims them; their jobs are left to it.",
            Query(f"max({_PREFIX}_foreign_namespaces{_HERE})", "namespaces"),
        ),
        Row("Process"),
        curve("Leader", "1 where a replica leads.", Query(f"{_PREFIX}_leader{_HERE}", "{{pod}}")),
        curve(
            "Memory",
            "Resident.",
            _process(f"process_resident_memory_bytes{_HERE}"),
            unit="bytes",
        ),
        curve(
            "CPU",
            "Cores in use.",
            _process(f"rate(process_cpu_seconds_total{_HERE}[$__rate_interval])"),
        ),
    ),
)
