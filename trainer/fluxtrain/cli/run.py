"""``fluxtrain run`` and ``plan``: a job on this machine, and its memory, time and disk space beforehand."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fluxtrain.cli import arguments as reference_environment
from fluxtrain.cli.arguments import (
    add_file,
    add_paths,
    given_root,
    job_name,
    load_config,
    number,
    path,
    report_end,
    require_processes,
    run_task,
    whole_number,
    write_text,
)
from fluxtrain.cli.data import check_pictures, chosen_sizes, run_of_source
from fluxtrain.contract.process import (
    ADAPTERS_FOLDER,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    GALLERY_FILE,
    LOSS_FILE,
    METRICS_FILE,
    MLPERF_FILE,
    SAMPLES_FOLDER,
    RunPaths,
)
from fluxtrain.contract.resource.fluxtraining import FluxTraining, cluster_only_fields
from fluxtrain.contract.resource.pod_template import amount
from fluxtrain.contract.run.closed_division import SAME_SYSTEM, TO_LEAVE, is_benchmark, is_closed
from fluxtrain.contract.run.config import RunConfig, require_replicas
from fluxtrain.contract.run.overrides import refuse_variables
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.contract.run.setting import Setting
from fluxtrain.data.pictures.folder import no_folder
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, UNSET, ConfigError, JoinedDataError
from fluxtrain.imports.variables import refuse_different
from fluxtrain.launch.nodes import Nodes, find_endpoint, serves
from fluxtrain.rendezvous.messages import MAX_NODES
from fluxtrain.report.records import read_records
from fluxtrain.runtime.program import importing

if TYPE_CHECKING:
    from fluxtrain.plan.estimate import Plan
    from fluxtrain.plan.first_file import Base, Machine

_NO_GPUS = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=action)
    parser.description = (
        "Run a task on this machine, such as training; the same command resumes it."
    )
    add_file(parser)
    add_paths(parser)
    text = "folder of the run (default: $LOGDIR/NAME, else runs/NAME)"
    parser.add_argument("--output", type=path, help=text)
    text = "trainer processes on this machine (default: the GPUs, or one)"
    parser.add_argument("--processes", type=whole_number, help=text)
    text = "run on the CPU, also where a GPU is"
    parser.add_argument("--cpu", action="store_true", help=text)
    add_nodes(parser)


def action(arguments: argparse.Namespace) -> int:
    job, config = load_config(arguments.file, arguments.overrides)
    nodes = parse_nodes(arguments, os.environ)
    if ignored := cluster_only_fields(job):
        print(f"ignored outside a cluster: {', '.join(ignored)}", file=sys.stderr)
    require_processes(arguments.processes)
    refuse_variables(os.environ, arguments.processes)
    refuse_different(os.environ, config)
    if nodes is not None:
        if config.task == "prepare":
            raise ConfigError("--nodes", UNSET, "the task prepare runs on one node")
        count = nodes.min_nodes, nodes.wanted_nodes
        if is_closed(config) and count[0] < count[1]:
            text = f"the closed division needs a fixed number (training rules {SAME_SYSTEM}); {TO_LEAVE}"
            raise ConfigError("--nodes", "{}:{}".format(*count), text)
        find_endpoint(nodes)
    _require_gpus(job, arguments.cpu)  # imports torch: only once the file is validated
    paths = _paths(arguments, job.metadata.name)
    if (message := _finished_message(config, paths)) is not None:
        print(message)
    elif (code := _run(arguments, job, config, paths, nodes)) != EXIT_OK:
        return code
    if config.task == "train" and (nodes is None or serves(nodes, find_endpoint(nodes))):
        print_summary(paths.output, config)
    return EXIT_OK


def _run(
    arguments: argparse.Namespace,
    job: FluxTraining,
    config: RunConfig,
    paths: RunPaths,
    nodes: Nodes | None,
) -> int:
    if nodes is None:
        return run_task(config, paths, arguments.processes)
    from fluxtrain.launch import several_nodes, torchrun

    processes = arguments.processes or torchrun.default_processes()
    restarts = job.spec.restart.max_restarts
    return report_end(*several_nodes.run(config, paths, processes, nodes, restarts))


def _require_gpus(job: FluxTraining, cpu: bool) -> None:
    """Raise ConfigError if torch sees none of this machine's GPUs, and the job asks for some."""
    if cpu:
        os.environ.update(_NO_GPUS)
    with importing():
        from fluxtrain.runtime.devices import missing_gpus, num_visible

    requested = job.spec.gpus_per_node
    if not requested or cpu or num_visible():
        return
    if reason := missing_gpus():
        raise ConfigError("spec.gpusPerNode", requested, f"{reason}; --cpu runs on the CPU")
    text = f"spec.gpusPerNode is {requested}, but torch sees no GPU here: this runs on the CPU"
    print(f"fluxtrain: {text}", file=sys.stderr)


def _paths(arguments: argparse.Namespace, job: str) -> RunPaths:
    """Return the run's folders and print each with its source: option, environment or default."""
    settings = {kind: reference_environment.root(kind, os.environ) for kind in ("data", "models")}
    settings["output"] = reference_environment.output(job, os.environ)
    for kind, default in settings.items():
        given = getattr(arguments, kind)
        if given is not None and (kind == "output" or str(given) != default.value):
            settings[kind] = reference_environment.Setting(str(given), f"--{kind}")
    os.environ.update(reference_environment.hugging_face(os.environ))
    print(" · ".join(f"{kind} {setting}" for kind, setting in settings.items()), file=sys.stderr)
    folders = {kind: Path(setting.value).resolve() for kind, setting in settings.items()}
    return RunPaths(folders["output"], folders["data"], folders["models"])


def _finished_message(config: RunConfig, paths: RunPaths) -> str | None:
    """Return the message for a run that is already complete, None for one that is not."""
    with importing():
        from fluxtrain.launch import torchrun
    from fluxtrain.prepare.preprocess_output import open_outputs

    if config.task == "preprocess":
        targets = open_outputs(config, paths)
        finished = all(target.is_finished for target in targets)
        return "preprocess: everything is there already" if finished else None
    if (state := torchrun.finished_state(config, paths.output)) is None:
        return None
    return f"{paths.output}: this run is over ({state.status} at step {state.step})."


_SLURM_RANK, _SLURM_TASKS = "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"
_LARGEST_PORT = 65535
_MAX_SECONDS = 86_400.0
_TIMEOUT = 600.0


def add_nodes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several nodes without Kubernetes", "the same command on each of them: docs/slurm.md"
    )
    # of type str: parse_nodes says what is wrong
    text = "number of nodes; MIN:MAX: continue as long as MIN are left"
    group.add_argument("--nodes", type=str, metavar="N|MIN:MAX", help=text)
    text = "where they meet: the node with this address, node rank 0 if ranks are given, serves it"
    group.add_argument("--rendezvous", type=str, metavar="HOST:PORT", help=text)
    text = "rank of this node, from 0 (default: $SLURM_NODEID, else by host name)"
    group.add_argument("--node-rank", type=str, metavar="R", help=text)
    text = f"wait for the rendezvous, and for enough nodes, for this long (default: {_TIMEOUT:g})"
    group.add_argument("--rendezvous-timeout", type=str, metavar="SECONDS", help=text)


def parse_nodes(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Nodes | None:
    """Return the nodes that ``arguments`` describe, None for a run on this machine alone.

    Raises ConfigError for an option that is wrong, or that lacks another one.
    """
    if arguments.nodes is None and arguments.rendezvous is None:
        _refuse(arguments, ("node_rank", "rendezvous_timeout"), "needs --nodes and --rendezvous")
        return None
    if arguments.rendezvous is None:
        text = "needs --rendezvous=HOST:PORT, the same on all nodes: where they meet"
        raise ConfigError("--nodes", arguments.nodes, text)
    if arguments.nodes is None:
        raise ConfigError("--rendezvous", arguments.rendezvous, "needs --nodes=N")
    fewest, wanted = _nodes(arguments.nodes)
    host, port = _endpoint(arguments.rendezvous)
    rank = _rank(arguments.node_rank, wanted, environment)
    return Nodes(fewest, wanted, host, port, rank, _seconds(arguments.rendezvous_timeout))


def _nodes(text: str) -> tuple[int, int]:
    fewest, colon, most = text.partition(":")
    numbers = [fewest, most if colon else fewest]
    if all(_is_number(number) for number in numbers):
        low, high = map(int, numbers)
        if 1 <= low <= high <= MAX_NODES:
            return low, high
    allowed = f"must be a number from 1 to {MAX_NODES}, or MIN:MAX such as 3:4"
    raise ConfigError("--nodes", text, allowed)


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    is_ipv6 = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_ipv6 else host
    is_host = host and is_ipv6 == (":" in host)
    if not is_host or not _is_number(port) or not 1 <= int(port) <= _LARGEST_PORT:
        allowed = (
            "must be HOST:PORT, with a name, an IPv4 address or an IPv6 address in brackets, and a port "
            f"from 1 to {_LARGEST_PORT}"
        )
        raise ConfigError("--rendezvous", text, allowed)
    return host, int(port)


def _rank(text: str | None, wanted: int, environment: Mapping[str, str]) -> int | None:
    source = "--node-rank"
    if text is None and environment.get(_SLURM_RANK):
        text, source = environment[_SLURM_RANK], f"${_SLURM_RANK}"
        tasks = environment.get(_SLURM_TASKS, "1").partition("(")[0]
        if tasks != "1":
            text = "one task per node: srun --ntasks-per-node=1"
            raise ConfigError(f"${_SLURM_TASKS}", tasks, text)
    if text is None:
        return None
    if not _is_number(text) or int(text) >= wanted:
        allowed = (
            f"must be from 0 to {wanted - 1}, as --nodes is {wanted}" if wanted > 1 else "must be 0"
        )
        raise ConfigError(source, text, allowed)
    return int(text)


def _seconds(text: str | None) -> float:
    if text is None:
        return _TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= _MAX_SECONDS:
        allowed = f"must be from 1 to {_MAX_SECONDS:g} seconds"
        raise ConfigError("--rendezvous-timeout", text, allowed)
    return seconds


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def print_summary(output: Path, config: RunConfig) -> None:
    """Print evaluation losses and output files; of a benchmark run also the checker's result."""
    records = read_records(output / METRICS_FILE)
    evaluations = [record for record in records if "eval_loss" in record]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        shown = [first, last] if first is not last else [first]
        losses = [f"{each['eval_loss']:.4f} (step {each['step']})" for each in shown]
        print(f"evaluation loss {' → '.join(losses)}")
    folder = output.relative_to(Path.cwd()) if output.is_relative_to(Path.cwd()) else output
    for title, name in _files(output, config):
        print(f"  {title:<18} {folder}/{name}")
    if is_benchmark(config):
        print(f"  {'MLPerf check':<18} {_check_result(output / MLPERF_FILE)}")


def _files(output: Path, config: RunConfig) -> list[tuple[str, str]]:
    images = sorted((output / SAMPLES_FOLDER).glob("step_*.png"))
    rows = [
        ("adapter", f"{ADAPTERS_FOLDER}/{config.adapter_file.name}.safetensors"),
        ("page", GALLERY_FILE),
        ("images", f"{SAMPLES_FOLDER}/{images[-1].name if images else ''}"),
        ("loss curve", LOSS_FILE),
        ("resolved config", CONFIG_FILE),
        ("every logged step", METRICS_FILE),
        ("checkpoints", f"{CHECKPOINTS_FOLDER}/"),
        ("MLPerf log", MLPERF_FILE),
    ]
    return [(title, name) for title, name in rows if (output / name).exists()]


def _check_result(log: Path) -> str:
    """Return the result of the compliance checker in one line, with its first finding."""
    from fluxtrain.mlperf import RULESETS, check

    ruleset = RULESETS[-1]
    result = check(log, ruleset)
    if result.success:
        return f"SUCCESS (compliance checker, ruleset {ruleset})"
    reason = result.explanations[0] if result.explanations else "see fluxtrain mlperf check"
    return f"not accepted under ruleset {ruleset}: {reason}"


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=print_plan)
    parser.description = "Estimate the memory, FLOPs, time and disk space of a job."
    add_file(parser)
    text = "root of relative paths, where pictures are counted (default: as of fluxtrain run)"
    parser.add_argument("--data", type=path, help=text)
    text = "GPU model, or cpu, as fluxtrain run --cpu (default: MI300X)"
    parser.add_argument("--gpu", help=text)
    text = "fraction of the dense peak (default: as predicted, else 0.3, of fp8's 0.2)"
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--mfu", type=number, help=text)
    text = "benchmark.json of the benchmark task, for the speed that it measured"
    speed.add_argument("--measured", type=path, metavar="FILE", help=text)
    text = "price of a GPU for an hour, in any currency: the costs of the run too"
    parser.add_argument("--gpu-hour", type=number, metavar="PRICE", help=text)
    text = (
        "take one step on fake tensors, with as many ranks, and compare; fails if the plan is wrong"
    )
    parser.add_argument("--verify", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")


def add_init(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=write_first_file)
    parser.description = "Write a FluxTraining of a LoRA that fits the GPUs by fluxtrain plan."
    text = "folder of pictures, here or below --data, with captions beside them or without"
    parser.add_argument("pictures", type=path, metavar="PICTURES", help=text)
    text = "word that stands for what the pictures show; it comes before each caption"
    parser.add_argument("--trigger", metavar="WORD", help=text)
    text = "dev (default), schnell, kontext, fill, depth, canny; or demo, make run's small model, on a CPU"
    parser.add_argument("--base", default="dev", help=text)
    text = "GPU model, such as rx7900xtx or mi300x (default: the smallest of this machine)"
    parser.add_argument("--gpu", help=text)
    text = "nodes (default: 1)"
    parser.add_argument("--nodes", type=whole_number, default=1, metavar="N", help=text)
    text = "GPUs of each node (default: those of this machine, or 1 with --gpu)"
    parser.add_argument("--gpus-per-node", type=whole_number, metavar="N", help=text)
    text = "file to write (default: PICTURES.yaml); it must not exist"
    parser.add_argument("--output", type=path, metavar="FILE", help=text)
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    add_paths(parser)


def write_first_file(arguments: argparse.Namespace) -> int:
    """Look at the pictures, write the file, and print how to fetch, run and look."""
    from fluxtrain.data.pictures.faults import num_lost
    from fluxtrain.data.pictures.kohya_config import repeats_note
    from fluxtrain.picture_cache.work import named
    from fluxtrain.plan import first_file

    base = first_file.base_of(arguments.base)
    root, given = _pictures(arguments)
    images = base.images_of(root / given, given)
    name = job_name(arguments.pictures.resolve().name)
    file = arguments.output or Path(f"{name}.yaml")
    if file.exists() and not (arguments.force and _is_job(file)):
        text = "exists already; name another one with --output"
        text += ", or replace it with --force" if _is_job(file) else ": it is no FluxTraining"
        raise ConfigError("--output", str(file), text)
    trigger = arguments.trigger
    if trigger is not None and not (trigger.strip() and first_file.is_prompt(trigger)):
        text = (
            "must be a word on one line, without -- as of options and # as of comments, or left out"
        )
        raise ConfigError("--trigger", trigger, text)
    machine = _machine(arguments, base)
    source = run_of_source(images["images"], root, base.side or first_file.SIDES[-1])
    source = merge(source, {"model": base.run.get("model", {}), "data": images})
    images |= {"image_size": base.side} if base.side else chosen_sizes(source, root)
    config = resolve(merge(source, {"data": images}))
    look = check_pictures(config, root)
    skipped = look.inspection.skipped
    if look.refusal(config):
        lost, used = num_lost(skipped), len(look.inspection.used)
        begin = f"{root / given}: {lost} of {used + lost} pictures cannot be used; at most a tenth may be"
        last = "mend or remove the files; captions must be UTF-8"
        raise JoinedDataError([begin, *named(skipped, None), last])
    run = first_file.first_run(
        images, look.inspection, name, arguments.trigger or None, base, machine
    )
    config = resolve(run)
    look = check_pictures(config, root, known=look.inspection)
    about = first_file.summary(config, len(look.inspection.used), look.steps, machine)
    text = first_file.file_text(name, run, config, about, machine, base)
    write_text(file, text)
    print(f"{file}: {about}")
    unrepeated = config.data.model_copy(update={"repeats": 1})  # nobody asked for the others
    notes = [*first_file.caption_notes(config, look.inspection), repeats_note(unrepeated, root)]
    for line in filter(None, [*named(look.inspection.skipped, None), *notes]):
        print(f"  {line}")
    for line in _next_steps(arguments, file, name, config):
        print(line)
    return EXIT_OK


def _is_job(file: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError):
        return "kind: FluxTraining" in file.read_text(encoding="utf-8")
    return False


def _pictures(arguments: argparse.Namespace) -> tuple[Path, str]:
    """Return a data root and the pictures as the file names them: below it, or, on one node, a whole path."""
    given, root = arguments.pictures, arguments.data
    for folder in (given, root / given):
        if folder.is_dir():
            whole, above = folder.resolve(), root.resolve()
            if whole.is_relative_to(above) and whole != above:
                return root, str(whole.relative_to(above))
            return (root, str(whole)) if arguments.nodes == 1 else (whole.parent, whole.name)
    text = f"must be a folder; there is none here, nor below {root}"
    if ":/" in str(given):  # a path has lost a slash of an address
        text = "is an address: download its pictures and name their folder, or set "
        text += "spec.run.data.images of a file to it: fluxtrain fetch FILE fetches them"
    elif _is_job(given):
        text = f"is a FluxTraining already: fluxtrain run {shlex.quote(str(given))} trains it"
    elif given.exists():
        text = no_folder(given)
    raise ConfigError("PICTURES", str(given).replace(":/", "://", 1), text)


def _machine(arguments: argparse.Namespace, base: Base) -> Machine:
    from fluxtrain.plan.first_file import Machine, gpu_here, named_gpu
    from fluxtrain.runtime.devices import num_visible

    if base.on_cpu:
        for option, given in (
            ("--gpu", arguments.gpu),
            ("--gpus-per-node", arguments.gpus_per_node),
        ):
            if given is not None:
                raise ConfigError(option, given, f"must be left out with --base={arguments.base}")
        if arguments.nodes != 1:
            raise ConfigError("--nodes", arguments.nodes, f"must be 1 with --base={arguments.base}")
        return Machine.without_gpu()
    gpu = named_gpu(arguments.gpu) if arguments.gpu else gpu_here()
    given = arguments.gpus_per_node
    per_node = given if given is not None else 1 if arguments.gpu else num_visible()
    for option, count, most in (
        ("--nodes", arguments.nodes, MAX_NODES),
        ("--gpus-per-node", per_node, 64),
    ):
        if not 1 <= count <= most:
            raise ConfigError(option, count, f"must be between 1 and {most}")
    return Machine(gpu, arguments.nodes, per_node)


def _next_steps(
    arguments: argparse.Namespace, file: Path, name: str, config: RunConfig
) -> Iterator[str]:
    from fluxtrain.encode.encoders import missing_models, next_step
    from fluxtrain.prepare.encoders import published_place

    given = shlex.quote(str(file))
    data, models = (given_root(arguments, kind) for kind in ("data", "models"))
    missing = missing_models(config, arguments.models)
    if missing and config.encoders.text == "minilm":
        yield f"  fetch  {', '.join(missing)}: {next_step(config)}"
    elif missing:
        licence = f"the licence of {published_place(config.model).rpartition('/')[2]}"
        yield f"  fetch  fluxtrain fetch {given}{models}"
        yield f"         (before: export HF_TOKEN=…, of an account that accepted {licence})"
    else:
        yield f"  fetch  nothing: all weights are in {arguments.models}"
    page = "http://127.0.0.1:9464"
    if arguments.nodes > 1:
        yield f"  run    kubectl apply -f {given}, with pictures and weights in the job's volumes"
        yield f"  look   kubectl port-forward POD_OF_RANK_0 9464, then {page}"
    else:
        output = reference_environment.output(name, os.environ).value
        yield f"  run    fluxtrain run {given}{data}{models}"
        yield f"  look   {page} while it trains, then {output}/{GALLERY_FILE}"


def print_plan(arguments: argparse.Namespace) -> int:
    from fluxtrain.mlperf.rcp import reference_mean
    from fluxtrain.plan.estimate import faster_change, fitting_change, make_plan
    from fluxtrain.plan.pictures import plan_pictures
    from fluxtrain.plan.speed import MeasuredSpeeds
    from fluxtrain.plan.table import render

    job, config = load_config(arguments.file, arguments.overrides, quiet=arguments.json)
    require_replicas(config, job.spec.rank_counts)
    is_cpu = arguments.gpu is not None and arguments.gpu.strip().lower() == "cpu"
    arguments.gpu = None if is_cpu else arguments.gpu
    size = job.spec.nodes.max, 0 if is_cpu else job.spec.gpus_per_node
    root = arguments.data or Path(reference_environment.root("data", os.environ).value)
    if config.task != "train":
        return _print_task(arguments, config, size, root)
    if arguments.verify:
        text = "must be left out with --verify, which compares memory and traffic, not speed"
        _refuse(arguments, ("mfu", "measured", "gpu_hour"), text)
        return _verify(config, *size, arguments.gpu, as_json=arguments.json)
    limit = job.spec.resources.limits.memory
    planned = partial(
        make_plan,
        nodes=size[0],
        gpus_per_node=size[1],
        gpu=arguments.gpu,
        mfu=arguments.mfu,
        fewest_nodes=job.spec.nodes.min,
        memory_limit=None if limit is None else int(amount(limit)),
        measured=MeasuredSpeeds(arguments.measured) if arguments.measured else None,
        pictures=plan_pictures(config, root),
        target=reference_mean(config),
        gpu_hour=arguments.gpu_hour,
    )
    plan = planned(config)
    if arguments.json:
        print(json.dumps(plan.model_dump(), indent=2))
        return EXIT_OK
    change = fitting_change(config, planned) if plan.fits is False else None
    print(render(plan, change, None if change else faster_change(config, planned)))
    return EXIT_OK


def _refuse(arguments: argparse.Namespace, names: Sequence[str], text: str) -> None:
    """Raise ConfigError with ``text`` if one of the options ``names`` is given."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value is not False:  # 0 is given too
            raise ConfigError(f"--{name.replace('_', '-')}", str(value), text)


def _print_task(
    arguments: argparse.Namespace, config: RunConfig, size: tuple[int, int], root: Path
) -> int:
    from fluxtrain.benchmark.results import Trial, settings
    from fluxtrain.plan.estimate import make_plan
    from fluxtrain.plan.tasks import Training, plan_benchmark, plan_task, render

    if config.task == "prepare":
        text = "has no plan: one node converts files, without a GPU"
        raise ConfigError("spec.run.task", config.task, text)
    text = f"must be left out: spec.run.task is {config.task}, not train"
    _refuse(arguments, ("verify", "measured", "gpu_hour"), text)
    ranks = size[0] * max(size[1], 1)

    def at(setting: Setting) -> Training:
        return lambda batch: Trial(setting, batch, ranks, batch * ranks, True).config(config)

    def plan(run: RunConfig) -> Plan:
        return make_plan(run, *size, arguments.gpu, arguments.mfu)

    if config.task == "benchmark":
        trainings = {str(setting): at(setting) for setting in settings(config)}
        plans = list(plan_benchmark(config, plan, trainings))
    else:
        plans = [plan_task(config, plan(config), root)]
    as_json = [each.model_dump() for each in plans]
    print(json.dumps(as_json, indent=2) if arguments.json else render(plans))
    return EXIT_OK


def _verify(
    config: RunConfig, num_nodes: int, gpus_per_node: int, gpu: str | None, as_json: bool
) -> int:
    from fluxtrain.plan.estimate import assumed_gpu
    from fluxtrain.plan.verify import render, verify

    comparison = verify(config, num_nodes, max(gpus_per_node, 1), assumed_gpu(gpu, gpus_per_node))
    print(comparison.model_dump_json(indent=2) if as_json else render(comparison))
    return EXIT_OK if comparison.holds else EXIT_ERROR
