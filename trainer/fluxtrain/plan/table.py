"""Format a plan as a table for a terminal, with units and assumptions."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.contract.run.config import AUTO
from fluxtrain.parallel.traffic import BETWEEN_NODES, HOP, WITHIN_NODE
from fluxtrain.plan.estimate import HOST_LINK, Plan
from fluxtrain.plan.pictures import PicturesPlan
from fluxtrain.plan.speed import DEFAULT_FP8_MFU, DEFAULT_MFU, MEASURED
from fluxtrain.runtime.progress import decimal
from fluxtrain.state.free_memory import reserve_of
from fluxtrain.train.micro_batch import USABLE

Row = tuple[str, str, str]  # name, value, remark


def render(plan: Plan, change: str | None = None, faster: tuple[str, Plan] | None = None) -> str:
    """Return the answer, ``plan`` as aligned rows under headings, and its assumptions.

    With the option ``change`` it would fit; with the options of ``faster``, GPUs would wait less.
    """
    sections = [
        ("model", _model(plan)),
        ("one step", _step(plan)),
        ("memory of one " + ("GPU" if plan.gpu else "process"), _memory(plan)),
        ("time", _time(plan)),
        ("checkpoints and data", _disk(plan)),
    ]
    if plan.pictures is not None:
        sections.append(("pictures", _pictures(plan.pictures, plan.global_batch_size)))
    answer = [*_answer(plan, change), *_faster(plan, faster)]
    return "\n".join([*answer, "", *aligned(sections), "", *_assumptions(plan)])


def verdict(total: int, room: int | None, fits: bool, ranks: str, change: str | None) -> str:
    """Return whether ``total`` bytes fit in the ``room`` of each of ``ranks``, or would after ``change``."""
    if room is None:
        return f"Memory: {gib(total)} of {ranks}."
    full = f"{gib(total)} of {gib(room)} ({total / room:.0%}) of {ranks}"
    remedy = f"To fit: {change}" if change else "No change of its settings makes it fit"
    return f"Fits: {full}." if fits else f"DOES NOT FIT: {full}. {remedy}."


def each_of(num_ranks: int, gpu: str | None) -> str:
    """Return the ranks whose memory is meant."""
    return f"{'each of ' * (num_ranks > 1)}{num_ranks} × {gpu or 'CPU process'}"


def _answer(plan: Plan, change: str | None) -> list[str]:
    total, ranks = plan.memory_bytes_per_gpu.total, each_of(plan.num_ranks, plan.gpu)
    lines = [verdict(total, plan.gpu_memory_bytes, plan.fits is not False, ranks, change)]
    for what, seconds, cost in (
        ("Training", plan.seconds, plan.cost),
        ("To MLPerf's target", plan.target_seconds, plan.target_cost),
    ):
        if seconds is not None:
            price = "" if cost is None else f", for {cost:,.0f}"
            lines.append(f"{what}: {duration(seconds)}{price}.")
    return lines


def _faster(plan: Plan, faster: tuple[str, Plan] | None) -> list[str]:
    if faster is None:
        return []
    options, other = faster
    less, more = (f"{each.exposed_fraction:.0%}" for each in (other, plan))
    rounds = "; gradients are summed in bfloat16" if "precision.reduce" in options else ""
    return [f"Faster: {options}: GPUs wait {less} of a step for collectives, not {more}{rounds}."]


def gib(num_bytes: float) -> str:
    """Return ``num_bytes`` in GiB, less than a hundredth in MiB, with two digits."""
    if 0 < num_bytes < 2**30 / 100:
        return f"{digits(num_bytes / 2**20)} MiB"
    return f"{digits(num_bytes / 2**30)} GiB"


def digits(number: float) -> str:
    """Return ``number`` with two significant digits, or as a whole number."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"


def aligned(sections: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    """Return the rows of all ``sections`` in the same columns, under their titles."""
    rows = [row for _, section in sections for row in section]
    names, values = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines: list[str] = []
    for title, section in sections:
        lines.append(title)
        for name, value, remark in section:
            lines.append(f"  {name:<{names}}  {value:>{values}}  {remark}".rstrip())
    return lines


def _model(plan: Plan) -> list[Row]:
    return [
        ("parameters", f"{plan.parameters:,}", _trained(plan)),
        ("FLOPs per sample", decimal(plan.flops_per_sample, "FLOP"), "forward and backward"),
        *_sizes(plan),
    ]


def _has_adapters(plan: Plan) -> bool:
    return plan.trainable_parameters != plan.parameters


def _trained(plan: Plan) -> str:
    if not _has_adapters(plan):
        return "all trained"
    return f"frozen; {plan.trainable_parameters:,} of adapters are trained"


def _sizes(plan: Plan) -> list[Row]:
    if plan.num_image_sizes == 1:
        return []
    text = (
        f"pixels: the largest of {plan.num_image_sizes} sizes; memory, FLOPs and time are its own"
    )
    return [("image", f"{plan.image_width} × {plan.image_height}", text)]


def _step(plan: Plan) -> list[Row]:
    ranks = f"{plan.num_ranks} × {plan.gpu or 'CPU process'}"
    sent = decimal(plan.communication_bytes_per_step, "B")
    return [
        ("global batch", f"{plan.global_batch_size:,}", f"on {ranks}{_replicas(plan)}"),
        ("micro batch", f"{plan.micro_batch_size:,}", _accumulation(plan)),
        ("samples per rank", f"{plan.samples_per_rank:,}", _padding(plan)),
        ("sent by each rank", sent, "weights gathered, gradients reduced"),
        *_between_nodes(plan),
        *_from_the_host(plan),
    ]


def _accumulation(plan: Plan) -> str:
    text = f"× {plan.accumulation_steps} per step"
    if plan.requested_micro_batch == AUTO:
        text += f"; auto, found for {'this GPU' if plan.gpu else 'half of the memory'}"
    if plan.gradient_sum_error:
        percent = 100 * plan.gradient_sum_error
        text += f"; the sum of gradients, in bfloat16, has an error of about {percent:.2f} %"
    return text


def _from_the_host(plan: Plan) -> list[Row]:
    copied, seconds = plan.offload_copied_bytes_per_step, plan.offload_seconds_per_step
    if not copied:
        return []
    text = f"by each rank, in {seconds:.2f} s"
    if plan.samples_per_second is not None:
        step = plan.global_batch_size / plan.samples_per_second
        text += f", of a step of {step:.2f} s"
        text += ": hidden behind it" if seconds < step else ": NOT HIDDEN, they set the step's time"
    return [("copied from host", decimal(copied, "B"), text)]


def _replicas(plan: Plan) -> str:
    requested, instead = plan.requested_replicas, ""
    if isinstance(requested, int) and requested != plan.dp_replicate:
        instead = f", not {requested}: each is part of one node, or whole nodes"
    elif plan.dp_replicate == 1:
        return ""
    return f" ({plan.dp_replicate} × {plan.dp_shard} shards{instead})"


def _between_nodes(plan: Plan) -> list[Row]:
    if plan.num_nodes == 1:
        return []
    sent = decimal(plan.node_communication_bytes_per_step, "B")
    if plan.shards_cross_nodes:
        text = f"to other nodes: shard groups of {plan.dp_shard} ranks cross nodes"
    else:
        text = "to other nodes: gradients only, no shard group crosses nodes"
    within = decimal(plan.communication_bytes_within_node_per_step, "B")
    rows = [("sent by each node", sent, text), ("sent within a node", within, "by all its ranks")]
    compute, exposed = plan.compute_seconds_per_step, plan.exposed_seconds_per_step
    if compute is None or exposed is None:
        return rows
    text = f"beside {compute:.2g} s of computing: {plan.exposed_fraction:.0%} of a step"
    return [*rows, ("exposed communication", f"{exposed:.2g} s", text)]


def _padding(plan: Plan) -> str:
    if plan.padded_samples == 0:
        return "no padding"
    return (
        f"of {plan.global_batch_size / plan.num_ranks:,.4g} needed: {plan.padded_samples:,} samples, "
        f"{plan.padding_percent:.1f} % of the work, are padding"
    )


def _memory(plan: Plan) -> list[Row]:
    parts, own = plan.memory_bytes_per_gpu, f"{plan.weight_dtype}, this rank's shard"
    frozen = "frozen as computed with, adapters " if _has_adapters(plan) else ""
    are_freed = plan.reshards_after_forward
    gathered = "weights of the current and the next" if are_freed else "all weights"
    saved = f"{plan.micro_batch_size} samples, and what their block's backward pass computes"
    return [
        ("weights", gib(parts.weights), f"{frozen}{own}"),
        ("gradients", gib(parts.gradients), f"{own}, as far as reduced at the peak"),
        ("optimizer", gib(parts.optimizer), "its state, float32, this rank's shard"),
        ("gathered blocks", gib(parts.gathered), f"{gathered}, and gradients in reduction"),
        ("activations", gib(parts.activations), saved),
        *_beside_the_model(plan),
        ("total", gib(parts.total), _fit(plan)),
    ]


def _beside_the_model(plan: Plan) -> list[Row]:
    parts = plan.memory_bytes_per_gpu
    rows = []
    if parts.encoders:
        text = "text encoders and autoencoder, frozen, of FLUX.1's published sizes"
        rows.append(("encoders", gib(parts.encoders), text))
    if parts.copied_ahead:
        text = "the next micro batch, and the first of an evaluation if there are any"
        rows.append(("copied ahead", gib(parts.copied_ahead), text))
    if parts.offload_buffers:
        text, host = "of two offloaded blocks", gib(plan.offloaded_bytes_per_node)
        rows.append(("offload buffers", gib(parts.offload_buffers), text))
        rows.append(("on the host", host, f"page-locked, in each node{_host_fit(plan)}"))
    return rows


def _host_fit(plan: Plan) -> str:
    limit = plan.memory_limit_bytes
    if limit is None or plan.offloaded_bytes_per_node <= limit:
        return ""
    return f": DO NOT FIT in limits.memory, {gib(limit)}"


def _fit(plan: Plan) -> str:
    if plan.gpu_memory_bytes is None:
        return ""
    text = f"of {gib(plan.gpu_memory_bytes)}: {'fits' if plan.fits else 'DOES NOT FIT'}"
    if plan.largest_micro_batch:
        return f"{text}; the largest micro batch is about {plan.largest_micro_batch}"
    return f"{text} at any micro batch"


def _time(plan: Plan) -> list[Row]:
    if plan.steps is None:
        text = "its epochs have as many steps as the data give: fluxtrain data check -f tells"
        return [("training", "unknown", text)]
    steps = f"{plan.steps:,} steps at most"
    if plan.samples_per_second is None or plan.seconds is None:
        return [("training", "unknown", f"{steps}; no peak is known for CPUs")]
    rate = plan.samples_per_second
    return [
        ("throughput", f"{digits(rate)} samples/s", f"{digits(rate / plan.num_ranks)} per GPU"),
        ("training", duration(plan.seconds), steps),
        *_cost("cost", plan, plan.cost),
        *_target(plan),
        *_cost("cost to the target", plan, plan.target_cost),
    ]


def _target(plan: Plan) -> list[Row]:
    """Return the row of MLPerf's target, if the run has it."""
    name, seconds, samples = "to MLPerf's target", plan.target_seconds, plan.target_samples
    if plan.target_source is None:
        return []
    if seconds is None or samples is None:
        return [(name, "unknown", plan.target_source)]
    text = f"{samples:,.0f} samples, the reference's mean: {plan.target_source}"
    ends = plan.seconds is not None and plan.seconds < seconds
    return [(name, duration(seconds), f"{text}{'; THE STEPS END BEFORE' if ends else ''}")]


def _cost(name: str, plan: Plan, cost: float | None) -> list[Row]:
    if cost is None or plan.gpu_hour is None:
        return []
    hours = f"{cost / plan.gpu_hour:,.0f} GPU hours at {plan.gpu_hour:g}"
    return [(name, f"{cost:,.0f}", hours)]


def _checkpoint(plan: Plan) -> str:
    if plan.weight_dtype == "float32":
        saved = "adapters" if _has_adapters(plan) else "weights"
        return f"{saved} and optimizer state, float32"
    return f"weights in {plan.weight_dtype}, and optimizer state"


def _disk(plan: Plan) -> list[Row]:
    kept = plan.disk_bytes // plan.checkpoint_bytes - 1
    loaded = "in /dev/shm of each node, at its fewest nodes, if all loaders are ahead"
    sample = decimal(plan.data_bytes_per_sample, "B")
    copy = "in host memory, while it is written"
    return [
        ("one checkpoint", gib(plan.checkpoint_bytes), _checkpoint(plan)),
        ("its copy per rank", gib(plan.host_bytes_per_rank), copy),
        ("snapshots", gib(plan.snapshot_bytes_per_node), _snapshots(plan)),
        ("loaded batches", gib(plan.loader_bytes_per_node), loaded),
        ("checkpoints", gib(plan.disk_bytes), f"{kept} kept, one being written"),
        ("one encoded sample", sample, "times the number of samples"),
    ]


def _pictures(pictures: PicturesPlan, batch: int) -> list[Row]:
    latents, captions = pictures.latents_per_picture, pictures.captions_per_picture
    of_each = f"at most {latents} × latents and {captions} × captions"
    rows = [("cache of one", decimal(pictures.bytes_per_picture, "B"), of_each)]
    counted = pictures.counted
    if counted is None:
        return [*rows, ("pictures", "unknown", str(pictures.unknown))]
    left_out = f"{counted.left_out:,} files are left out" if counted.left_out else ""
    held_out = f"{counted.held_out:,} are held out" if counted.held_out else ""
    steps = f"{counted.steps_per_epoch:,.4g} steps of {batch:,}"
    encoded = f"latents, and {counted.captions:,} captions with the empty one; equal ones once"
    return [
        ("pictures", f"{counted.pictures:,}", "; ".join(filter(None, (left_out, held_out)))),
        ("samples of an epoch", f"{counted.samples:,}", steps),
        ("to encode", f"{counted.latents:,}", encoded),
        ("cache", gib(counted.cache_bytes), "if all can be decoded, which data check tries"),
        *rows,
    ]


def _snapshots(plan: Plan) -> str:
    if plan.snapshot_bytes_per_node == 0:
        return "none are taken in memory"
    text = "in the memory of each node, at its fewest nodes"
    limit = plan.memory_limit_bytes
    used = plan.offloaded_bytes_per_node + plan.snapshot_bytes_per_node
    if limit is not None and used + 2 * reserve_of(limit) > limit:
        return f"{text}: DO NOT FIT in limits.memory, {gib(limit)}; none are taken"
    return text


def _assumptions(plan: Plan) -> list[str]:
    lines, peak = list[str](), f"of the {plan.gpu}'s dense {plan.mfu_dtype} peak"
    change = "--gpu, --mfu and --measured change it."
    if plan.measured is not None:
        text = "" if plan.mfu is None else f", {plan.mfu:.1%} {peak}"
        lines.append(f"Measured {plan.measured}{text}.")
    elif plan.is_predicted:
        rates = "measured" if plan.gpu == MEASURED else "assumed"
        lines += [
            f"Predicted: {plan.mfu:.0%} {peak}; {change}",
            f"It follows from the FLOPs and bytes of the generated code, at {rates} rates of the GPU.",
        ]
    elif plan.mfu is not None:
        usual = DEFAULT_FP8_MFU if plan.mfu_dtype == "fp8" else DEFAULT_MFU
        default = " (the default)" if plan.mfu == usual else ""
        lines.append(f"Assumed: {plan.mfu:.0%} {peak}{default}; {change}")
    if plan.mfu_dtype == "float32" and plan.mfu is not None:
        lines.append("Assumed: float32 products as torch computes them, not in TF32.")
    if plan.gpu is not None:
        lines.append(
            f"Assumed: a micro batch fits if the total is below {USABLE:.0%} of the memory."
        )
    if plan.exposed_seconds_per_step is not None:
        links = f"{BETWEEN_NODES / 1e9:.0f} GB/s of each GPU between nodes, {WITHIN_NODE / 1e9:.0f} within"
        text = f"{links}, {HOP * 1e6:.0f} µs to the next rank"
        waiting = "the waiting" if plan.is_predicted else "of the waiting what the MFU has"
        lines.append(f"Assumed: {text}. The hours include {waiting}.")
    if plan.offload_copied_bytes_per_step:
        lines.append(f"Assumed: {HOST_LINK / 1e9:.0f} GB/s from host memory (PCIe 4.0, 16 lanes).")
    lines.append("Not counted: start-up, evaluation, sampling, waiting for data and checkpoints.")
    return lines


def duration(seconds: float) -> str:
    """Return ``seconds`` in the unit that people would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 72 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
