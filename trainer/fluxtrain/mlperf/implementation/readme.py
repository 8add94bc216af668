"""``README.md`` of a package: what ran, and the steps to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fluxtrain.mlperf.evidence import FailedRun, Run
from fluxtrain.mlperf.failed_runs import file_name
from fluxtrain.mlperf.implementation.deviations import cell
from fluxtrain.mlperf.implementation.software import Software

_TEMPLATE = Path(__file__).parent / "templates/README.md"
_WITHOUT_IMAGE = """\
$ ./setup.sh             # the packages of requirements.txt, once on each node
$ ./init_datasets.sh     # once
$ ./run_and_time.sh N"""
_IN_IMAGE = """\
$ docker build --tag result .
$ ROOTS="-v /data:/data -v /models:/models -v /results:/results -e DATAROOT -e MODELROOT -e LOGDIR"
$ docker run --rm $ROOTS result /implementation/init_datasets.sh
$ DEVICES="--device /dev/kfd --device /dev/dri"    # of AMD; of NVIDIA: --gpus all
$ docker run --rm $ROOTS --ipc host $DEVICES result /implementation/run_and_time.sh N"""


def readme(
    runs: Sequence[Run],
    description: Mapping[str, str],
    software: Software,
    image: str | None,
    waivers: Mapping[str, str],
    others: Sequence[Run],
    failed: Sequence[FailedRun],
) -> str:
    """Return the text for ``runs`` on the system of ``description``."""
    rows = [f"- {rule}: {cell(reason)}" for rule, reason in waivers.items()]
    head = "\nFindings of `fluxtrain mlperf review` that are waived:\n\n"
    return _TEMPLATE.read_text().format(
        **description,
        version=software.fluxtrain,
        python=software.python,
        commit=software.revision or "unknown",
        where=_where(software, image),
        steps=_WITHOUT_IMAGE if image is None else _IN_IMAGE,
        results="\n".join(_row(f"result_{index}.txt", run) for index, run in enumerate(runs)),
        others=_others(others, len(runs)) + _failed(failed),
        waived=head + "\n".join(rows) if rows else "",
    )


def _where(software: Software, image: str | None) -> str:
    if image is not None:
        return f"The runs were in the image `{image}`, which `Dockerfile` extends."
    if software.in_container:
        return "The runs were in a container whose image is not known by its digest."
    return "The runs were in no container; `Dockerfile` makes one with the same packages."


def _others(others: Sequence[Run], counted: int) -> str:
    """Return the rows of the runs that do not count, and why they do not."""
    if not others:
        return ""
    rows = [_row(f"other_runs/run_{index:02}.txt", run) for index, run in enumerate(others)]
    text = f"The result is the consecutive {counted} with the median score, of {counted + len(others)} runs."
    return "\n".join([*rows, "", text, ""])


def _failed(failed: Sequence[FailedRun]) -> str:
    """Return what is known of the runs that failed, a line for each."""
    if not failed:
        return ""
    lines = [f"- {_told(number, run)}" for number, run in enumerate(failed)]
    text = "Runs that failed before their end, and so are no runs of a result:"
    return "\n".join(["", text, "", *lines, ""])


def _told(number: int, run: FailedRun) -> str:
    log = "no log" if run.log is None else f"`{file_name(number)}`, seed {run.log.value('seed')}"
    code = "" if run.exit_code is None else f" (exit code {run.exit_code})"
    return f"{run.name}, {log}: {cell(run.reason)}{code}"


def _row(name: str, run: Run) -> str:
    time = f"{run.minutes:.2f}" if run.samples else ""
    return f"| {name} | {run.value('seed')} | {run.samples or 'did not converge'} | {time} |"
