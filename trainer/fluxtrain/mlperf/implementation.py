"""The folder of a package with what is needed to repeat its runs, made from what their nodes reported.

SYSTEM_fluxtrain/
  README.md, SYSTEM_fluxtrain.json         what ran, and how to repeat it; the same as data
  Dockerfile                               the image that ran, by its digest
  setup.sh init_datasets.sh run_and_time.sh
  config_0.json job_0.yaml chain_0.jsonl   of each run: its configuration, as a job too, its log's chain
  fluxtrain/ requirements.txt nodes.json   the sources and packages that ran, and on which nodes
  deviations.md                            each difference from the reference, with its reason
  other_runs/ failed_runs.json             logs of runs that do not count; why runs failed
  waivers.json                             the review's findings that the submitter knows of
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from fluxtrain.contract.run.closed_division import (
    ACCUMULATION,
    Deviation,
    deviations,
    unused_reasons,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.presets import MLPERF_TRAINING_SET, MLPERF_VALIDATION_SET
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.mlperf.evidence import (
    BENCHMARK,
    OTHERS_FOLDER,
    WAIVERS_FILE,
    FailedRun,
    Run,
    chain_of,
    count_of,
    enclosed_name,
    file_name,
    is_file,
    write_failed,
    write_json,
)
from fluxtrain.mlperf.facts import (
    DATA_KEY,
    NODE_KEYS,
    SOURCE,
    NodeRecord,
    is_source,
    read,
    source_digest,
)
from fluxtrain.mlperf.jobs import read_ran_job

_HEAD = """\
#!/usr/bin/env bash
# Once: the data sets of the runs. It can be stopped and started again.
#   DATAROOT, MODELROOT   folders of the data sets, and of weights
{more}set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
python=${{ENVIRONMENT:-$here/environment}}/bin/python
[ -x "$python" ] || python=${{PYTHON:-python3}}
export PYTHONPATH=$here
prepare() {{ "$python" -m fluxtrain.cli prepare "$@"; }}

"""
_MANIFESTS = {
    "train": "flux-1-cc12m-preprocessed",
    "validation": "flux-1-coco-preprocessed",
    "empty_encodings": "flux-1-empty-encodings",
}
"""Names of MLCommons' manifests, by the fields of ``data``."""


def init_datasets(run: Run, config: RunConfig) -> str:
    """Return the script for ``run``: MLCommons' sets if it has their sizes, else what its source needs."""
    is_benchmark = (run.number("train_samples"), run.number("eval_samples")) == (
        MLPERF_TRAINING_SET,
        MLPERF_VALIDATION_SET,
    )
    if config.data.source == "synthetic":
        lines = ['echo "init_datasets: the runs generate their samples; nothing is needed"']
        return _script("", lines)
    if config.preset == "openmoji":
        return _script("", ['prepare openmoji --data "$DATAROOT" --models "$MODELROOT"'])
    if is_benchmark and config.data.source == "encoded":
        text = "#   METADATA              folder or URL of MLCommons' manifests\n"
        return _script(text, list(_downloads(config)))
    if is_benchmark and config.preset == "mlperf-schnell-raw":
        text = "#   COCO                  folder or URL of COCO's two archives of 2014\n"
        text += "#   CC12M, FLUX           the raw training set; the encoders, as published\n"
        return _script(text, list(_from_raw(config)))
    return _script("", list(_own(config)))


def _downloads(config: RunConfig) -> Iterator[str]:
    """Yield the downloads of MLCommons' sets; each file is verified by its MD5."""
    yield "METADATA=${METADATA:-https://training.mlcommons-storage.org/metadata}"
    for each_field, name in _MANIFESTS.items():
        folder = _at("DATAROOT", getattr(config.data, each_field))
        yield f'prepare download --manifest "$METADATA/{name}.uri" --output {folder}'


def _from_raw(config: RunConfig) -> Iterator[str]:
    """Yield what prepares the raw sets and the encoders; each verifies what it reads."""
    yield "CC12M=${CC12M:-hf://datasets/pixparse/cc12m-wds}"
    yield "FLUX=${FLUX:-hf://black-forest-labs/FLUX.1-schnell}"
    yield f'prepare cc12m --input "$CC12M" --output {_at("DATAROOT", config.data.train)}'
    assert config.data.validation is not None, "a benchmark evaluates"
    yield f'prepare coco --archives "$COCO" --output {_at("DATAROOT", config.data.validation)}'
    yield 'prepare encoders --from "$FLUX" --output "$MODELROOT"'


def _own(config: RunConfig) -> Iterator[str]:
    """Yield commands that look for data sets which only the submitter can give."""
    yield "missing=0"
    fields = ["train" if config.data.images is None else "images"]
    if config.data.validation is not None:
        fields.append("validation")
    if config.data.source == "encoded" and config.data.images is None:
        fields.append("empty_encodings")
    for each_field in fields:
        path = _at("DATAROOT", getattr(config.data, each_field))
        text = f'echo "init_datasets: data.{each_field} is missing: "{path} >&2; missing=1;'
        yield f"[ -e {path} ] || {{ {text} }}"
    yield 'exit "$missing"'


def _at(root: str, path: str) -> str:
    """Return ``path`` as a word of the shell, relative ones below the folder in the variable ``root``."""
    quoted = shlex.quote(path)
    return quoted if PurePosixPath(path).is_absolute() else f'"${root}"/{quoted}'


def _script(more: str, lines: list[str]) -> str:
    return _HEAD.format(more=more) + "\n".join(lines) + "\n"


_LOGGED = (
    *("submission_org", "submission_division", "global_batch_size", "micro_batch_size"),
    *("gradient_accumulation_steps", "train_samples", "eval_samples"),
    *("lowest_numerical_precision_in_linear", "lowest_numerical_precision_in_attn"),
    "lowest_numerical_precision_in_comm",
)
"""Keys of the log that the file repeats."""


def implementation_json(
    run: Run, config: RunConfig, software: Software, image: str | None, name: str
) -> dict[str, Any]:
    """Return the description of ``name``, of a ``run`` and the software of all runs."""
    return {
        "implementation": name,
        "benchmark": BENCHMARK,
        **{key: run.value(key) for key in _LOGGED},
        "starting_weights": config.initial_weights or "random, from the seed of each run",
        "weight_data_type": f"{config.precision.weights}, computed in {config.precision.compute}",
        "input_data_type": config.encoders.precision,
        "data": {
            "source": config.data.source,
            "train": config.data.train,
            "validation": config.data.validation,
            "order": config.data.order,
            "index_sha256": run.value(DATA_KEY),
        },
        "source": {
            "version": software.fluxtrain,
            "commit": software.revision or None,
            "sha256": software.source_sha256,
        },
        "python": software.python,
        "image": image,
        "in_container": software.in_container,
    }


DEVIATIONS_FILE = "deviations.md"
_MAX_SHOWN = 8
_STATEMENT = """\
# Differences from the reference

How these runs differ from MLCommons' reference of the benchmark, where it bears on numbers.

| | reference | these runs | reason |
|---|---|---|---|
"""
_NO_REASON = "set by the job; the submitter gave no reason"


def statement(found: Sequence[Deviation]) -> str:
    """Return the statement in Markdown: one row for each difference."""
    return _STATEMENT + "".join(f"{row_of(each, each.reason or _NO_REASON)} |\n" for each in found)


def row_of(found: Deviation, reason: str) -> str:
    """Return the row of a difference in the statement, up to its end."""
    return f"| {' | '.join(map(cell, (found.topic, found.reference, found.run, reason)))}"


def summary(found: Sequence[Deviation]) -> str:
    """Return the number of differences, and those of which nobody gave a reason."""
    silent = [each.topic for each in found if each.reason is None]
    shown = ", ".join(silent[:_MAX_SHOWN]) + (", ..." if len(silent) > _MAX_SHOWN else "")
    rest = f"; without a reason (--reason FIELD=REASON): {shown}" if silent else ""
    return f"{len(found)}{rest}"


def cell(text: str) -> str:
    """Return ``text`` as a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


_TEMPLATES = Path(__file__).parent / "templates"
_EXECUTABLE = 0o755


@dataclass(frozen=True)
class Statements:
    """What the submitter states: reasons for findings of the review and for changes, and the image."""

    waivers: Mapping[str, str] = field(default_factory=dict)
    """By rule of the review."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By field of the configuration, or by section."""
    image: str | None = None
    """By its digest; None if the runs were in none."""
    others: Sequence[Run] = ()
    """Of more than ten runs, those that do not count."""
    failed: Sequence[FailedRun] = ()


def run_deviations(run: Run, reasons: Mapping[str, str]) -> list[Deviation]:
    """Return how ``run`` differs from the reference; raise ConfigError for a reason without a difference."""
    config = run.resolved
    if unused := unused_reasons(config, reasons):
        changed = [each.topic for each in deviations(config, {}) if "." in each.topic]
        text = (
            f"is as in the reference, or no field; changed fields: {', '.join(changed) or 'none'}"
        )
        raise ConfigError("--reason", unused[0], text)
    found = list(deviations(config, reasons))
    steps = run.number("gradient_accumulation_steps") or 1
    return [*found, ACCUMULATION] if steps > 1 else found


def write_implementation(
    runs: Sequence[Run],
    description: Mapping[str, str],
    statements: Statements,
    folder: Path,
) -> None:
    """Write the ``folder`` of ``runs``, which have equal settings.

    Raises ConfigError if they ran different software, or other sources than this program's.
    """
    software, config = ran_software(runs), runs[0].resolved
    _copy_sources(software, folder / "fluxtrain")
    for index, run in enumerate(runs):
        write_json(folder / f"config_{index}.json", dict(run.config or {}))
        if (chain := chain_of(run)) is not None and is_file(chain):
            shutil.copyfile(chain, folder / enclosed_name(index))
        job = job_text(run, f"result-{index}", statements.image)
        (folder / f"job_{index}.yaml").write_text(job, encoding="utf-8")
    (folder / "requirements.txt").write_text(software.requirements, encoding="utf-8")
    (folder / "Dockerfile").write_text(dockerfile(software, statements.image), encoding="utf-8")
    _write_script(folder / "init_datasets.sh", init_datasets(runs[0], config))
    for script in sorted(_TEMPLATES.glob("*.sh")):
        _write_script(folder / script.name, script.read_text(encoding="utf-8"))
    write_json(folder / NODES_FILE, reported_nodes(runs))
    for index, run in enumerate(statements.others):
        (folder / OTHERS_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(run.log, folder / OTHERS_FOLDER / f"run_{index:02}.txt")
    write_failed(statements.failed, folder)
    if statements.waivers:
        write_json(folder / WAIVERS_FILE, dict(statements.waivers))
    found = run_deviations(runs[0], statements.reasons)
    (folder / DEVIATIONS_FILE).write_text(statement(found), encoding="utf-8")
    about = implementation_json(runs[0], config, software, statements.image, folder.name)
    write_json(folder / f"{folder.name}.json", about)
    text = readme(runs, description, software, statements)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _copy_sources(software: Software, target: Path) -> None:
    """Copy the sources that ran to ``target``; raise ConfigError if this program's are others."""
    if source_digest(SOURCE) != software.source_sha256:
        ran = software.revision or f"version {software.fluxtrain}, of an unknown commit"
        text = f"not the sources that ran ({ran}); package with those"
        raise ConfigError("fluxtrain", str(SOURCE), text)
    for path in sorted(SOURCE.rglob("*")):
        relative = path.relative_to(SOURCE)
        if path.is_file() and is_source(relative):
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / relative)


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(_EXECUTABLE)


_DIGEST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*@sha256:[0-9a-f]{64}")
_OPTION = "--image"
_HOW = "the imageID in the status of the run's pods: kubectl get pod NAME -o yaml"


def fetched_image(runs: Sequence[Run]) -> str | None:
    """Return the image of all ``runs`` if they were fetched from a cluster that told it by its digest.

    Raises ConfigError if they were in different ones.
    """
    jobs = [read_ran_job(run.log.parent) for run in runs]
    images = {str(job["spec"].get("image")) for job in jobs if job is not None}
    found = sorted(image for image in images if _DIGEST.fullmatch(image))
    if len(found) > 1:
        text = f"the runs were in different images: {', '.join(found)}"
        raise ConfigError(_OPTION, UNSET, text)
    return found[0] if found else None


def find_image(given: str | None, software: Software, closed: bool) -> str | None:
    """Return the ``given`` image, None if the runs were in no container or, if open, it is unknown.

    Raises ConfigError if it is not given by its digest, or missing in the closed division.
    """
    if given is None:
        if software.in_container and closed:
            text = (
                f"missing: the runs were in a container; needed: REPOSITORY@sha256:DIGEST ({_HOW})"
            )
            raise ConfigError(_OPTION, UNSET, text)
        return None
    image = given.removeprefix("docker-pullable://")  # of the status of pods on Docker
    if not _DIGEST.fullmatch(image):
        text = f"must be REPOSITORY@sha256:DIGEST, as tags can be moved ({_HOW})"
        raise ConfigError(_OPTION, given, text)
    return image


_ON_IMAGE = """\
# The image that ran, by its digest, with this folder in it.
# It was built by images/trainer.Dockerfile of fluxtrain, commit {commit}.
FROM {image}
COPY . /implementation
LABEL org.opencontainers.image.revision={commit}
ENTRYPOINT []
CMD ["/implementation/run_and_time.sh"]
"""
_ON_PYTHON = """\
# What ran {known}. This image has the same Python and packages.
# Torch for GPUs is not in pip's default index: --build-arg PIP_OPTIONS=--index-url=...
FROM python:{python}-slim
ARG PIP_OPTIONS=""
COPY requirements.txt /tmp/
RUN pip install --no-cache-dir ${{PIP_OPTIONS}} --no-deps --requirement /tmp/requirements.txt
COPY . /implementation
LABEL org.opencontainers.image.revision={commit}
CMD ["/implementation/run_and_time.sh"]
"""


def dockerfile(software: Software, image: str | None) -> str:
    """Return a Dockerfile of what ran: from ``image``, or from Python and the packages of the runs."""
    commit = software.revision or "unknown"
    if image is not None:
        return _ON_IMAGE.format(image=image, commit=commit)
    known = "was not in a container" if not software.in_container else "is not known by its digest"
    return _ON_PYTHON.format(known=known, python=software.python, commit=commit)


_STORAGE = {
    "data": {"persistentVolumeClaim": {"claimName": "data"}},
    "models": {"persistentVolumeClaim": {"claimName": "models"}},
    "output": {"persistentVolumeClaim": {"claimName": "output"}},
}


def job_text(run: Run, name: str, image: str | None) -> str:
    """Return the job that repeats ``run``, in YAML: its nodes, GPUs and image, and its own seed.

    The spec is that of the job that ran, if it was fetched from a cluster, without the jobs that it followed.
    """
    config = dict(run.config or {})
    if (seed := run.number("seed")) is not None:
        config["seed"] = seed
    ran = read_ran_job(run.log.parent)
    spec = _told_spec(run) if ran is None else dict(ran["spec"])
    if ran is not None:
        waits = ("startAfter", "startWhen")
        lifecycle = (spec.get("lifecycle") or {}).items()
        spec["lifecycle"] = {name: value for name, value in lifecycle if name not in waits}
    spec = {**spec, **({} if image is None else {"image": image}), "run": config}
    job = {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": name},
        "spec": spec,
    }
    head = "# Volume claims have other names elsewhere; fluxtrain run ignores them.\n"
    return head + yaml.safe_dump(job, sort_keys=False)


def _told_spec(run: Run) -> dict[str, Any]:
    """Return nodes and GPUs as the log tells them, and claims to fill in."""
    spec: dict[str, Any] = {"storage": _STORAGE}
    if (nodes := count_of(run.system, "number_of_nodes")) is not None and nodes > 0:
        spec["nodes"] = {"min": nodes, "max": nodes}
    if (gpus := count_of(run.system, "accelerators_per_node")) is not None:
        spec["gpusPerNode"] = gpus
    return spec


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
    statements: Statements,
) -> str:
    """Return the text for ``runs`` on the system of ``description``."""
    rows = [f"- {rule}: {cell(reason)}" for rule, reason in statements.waivers.items()]
    head = "\nFindings of `fluxtrain mlperf review` that are waived:\n\n"
    return _TEMPLATE.read_text(encoding="utf-8").format(
        **description,
        version=software.fluxtrain,
        python=software.python,
        commit=software.revision or "unknown",
        where=_where(software, statements.image),
        steps=_WITHOUT_IMAGE if statements.image is None else _IN_IMAGE,
        results="\n".join(_row(f"result_{index}.txt", run) for index, run in enumerate(runs)),
        others=_others(statements.others, len(runs)) + _failed(statements.failed),
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


NODES_FILE = "nodes.json"
"""Of a package, beside its code."""
_SOFTWARE_MAX_SHOWN = 3
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")


@dataclass(frozen=True)
class Software:
    """Versions, commit and digest of the sources, and packages of all nodes of all runs."""

    python: str
    fluxtrain: str
    revision: str
    """Empty if nobody knows it."""
    source_sha256: str
    in_container: bool
    packages: Mapping[str, str]

    @property
    def requirements(self) -> str:
        """Return the lines of requirements.txt, without fluxtrain, which is enclosed."""
        others = [f"{name}=={version}" for name, version in self.packages.items()]
        return "".join(f"{line}\n" for line in others if not line.startswith("fluxtrain=="))


def records(run: Run) -> list[NodeRecord]:
    """Return what the nodes of ``run`` reported."""
    return read([(line.key, line.value) for line in run.all(*NODE_KEYS)])


def reported_nodes(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of the nodes of each run, as NODES_FILE has them."""
    return {
        f"result_{index}": [asdict(record) for record in records(run)]
        for index, run in enumerate(runs)
    }


def ran_software(runs: Sequence[Run]) -> Software:
    """Return the software of all nodes of ``runs``; raise ConfigError if one has none, or another one."""
    found: dict[str, Software] = {}
    for run in runs:
        told = [record for record in records(run) if record.software and record.packages]
        if not told:
            text = "its log does not say which software ran; repeat the run with this version"
            raise ConfigError(run.name, UNSET, text)
        for record in told:
            found[f"{run.name}, nodes {record.nodes}"] = _software(record)
    for place, each in found.items():
        known = (each.python, each.fluxtrain, each.revision)
        texts = [*each.packages, *each.packages.values(), *filter(None, known)]
        if (name := next((text for text in texts if not _NAME.fullmatch(text)), None)) is not None:
            raise ConfigError(place, name, "is no name or version of a package, as a log has them")
    (first_place, first), *others = found.items()
    for place, other in others:
        if other != first:
            text = f"ran other software than {first_place}: {_difference(first, other)}"
            raise ConfigError(place, UNSET, text)
    return first


def _software(record: NodeRecord) -> Software:
    told = record.software
    return Software(
        told.get("python", ""),
        told.get("fluxtrain", ""),
        told.get("revision", ""),
        told.get("source_sha256", ""),
        told.get("container") == "yes",
        record.packages,
    )


def _difference(first: Software, other: Software) -> str:
    names = ("python", "fluxtrain", "revision", "source_sha256", "in_container")
    pairs = [(it, getattr(first, it) or "unknown", getattr(other, it) or "unknown") for it in names]
    packages = sorted({*first.packages, *other.packages})
    pairs += [
        (it, first.packages.get(it, "none"), other.packages.get(it, "none")) for it in packages
    ]
    texts = [f"{name} {ours} instead of {theirs}" for name, theirs, ours in pairs if ours != theirs]
    more = len(texts) - _SOFTWARE_MAX_SHOWN
    return ", ".join(texts[:_SOFTWARE_MAX_SHOWN]) + (f", and {more} more" if more > 0 else "")
