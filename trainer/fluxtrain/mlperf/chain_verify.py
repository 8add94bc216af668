"""The chain beside an MLPerf log: each hash depends on all lines before, so a later change shows."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from fluxtrain.contract.process import CHECKPOINTS_FOLDER, ENV_ATTEMPT, ENV_GENERATION, ENV_IMAGE
from fluxtrain.contract.run.config import RANDOM_SEED, RunConfig
from fluxtrain.errors import ConfigError, DataError, one_line
from fluxtrain.mlperf.chain import (
    CHECKPOINT,
    END,
    LINE,
    NONE_BEFORE,
    RESUME,
    START,
    WEIGHTS,
    Chain,
    ChainedLine,
    Record,
    digest,
    follow,
    is_digest,
    lines_of,
    parsed,
    split,
)
from fluxtrain.mlperf.chain import parse as parse_chain
from fluxtrain.mlperf.evidence import Run
from fluxtrain.mlperf.facts import CHAIN_KEY
from fluxtrain.mlperf.log_lines import TOKEN
from fluxtrain.mlperf.log_lines import parse as parse_line
from fluxtrain.runtime.files import blocks_of
from fluxtrain.state import run_state
from fluxtrain.state.run_state import RunState

_KILLED = "the process was killed between the two writes"


def compare(log: bytes, records: Sequence[Record], verdict: Verdict) -> None:
    """Name the first line of ``log`` that is not that of the chain's ``records``."""
    texts, torn = log_lines(log)
    token = TOKEN.encode()
    lines = log.split(b"\n")
    strangers = (number for number, line in enumerate(lines[:-1], 1) if not line.startswith(token))
    if (number := next(strangers, None)) is not None:
        verdict.find(
            f"line {number} was inserted: the run wrote no line without {TOKEN} at its beginning"
        )
    chained = [line.text for line in lines_of(records)]
    last = records[-1].kind if records else None
    if last == RESUME and texts != chained:
        before = [line.text for line in lines_of(records[:-1])]
        if texts in (before, before[:-1]):
            verdict.note("the log is not yet that of the last resume: the process was killed first")
            return
    if torn:
        if last == LINE and texts == chained[:-1] and chained[-1].startswith(torn):
            verdict.note(f"the last line of the log is torn: {_KILLED}; the chain has all of it")
        else:
            verdict.find(f"line {len(texts) + 1} is cut off: {_brief(torn)}")
        return
    if last == LINE and texts == chained[:-1]:
        verdict.note(f"the log lacks the last line, which the chain has: {_KILLED}")
    elif texts != chained:
        verdict.find(first_difference(texts, chained))


def log_lines(content: bytes) -> tuple[list[str], str]:
    """Return the lines with MLCommons' token, from it on, and such a last line without its newline."""
    *whole, last = content.decode("latin-1").split("\n")
    texts = [TOKEN + line.rsplit(TOKEN, 1)[1] for line in whole if TOKEN in line]
    return texts, TOKEN + last.rsplit(TOKEN, 1)[1] if TOKEN in last else last


def first_difference(texts: Sequence[str], chained: Sequence[str]) -> str:
    """Return what is wrong with the first of ``texts`` that is not that of ``chained``."""
    pairs = zip(texts, chained, strict=False)
    equal = min(len(texts), len(chained))
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), equal)
    place = f"line {at + 1}"
    if at == len(texts):
        count = len(chained) - at
        return f"{place} ({_brief(chained[at])}) is missing, and {count - 1} after it: the end was removed"
    found = texts[at]
    if at == len(chained):
        again = " a second time" if found in chained else ""
        return f"{place} ({_brief(found)}) was inserted{again}: the chain ends before it"
    if found.rstrip("\r") == chained[at]:
        return f"{place} ({_brief(chained[at])}) ends with a carriage return: the log was converted"
    if found in chained[at + 1 :]:
        if chained[at] in texts[at + 1 :]:
            return f"{place} ({_brief(chained[at])}) was moved: {_brief(found)} is in its place"
        return f"{place} ({_brief(chained[at])}) was removed: {_brief(found)} is in its place"
    if chained[at] in texts[at + 1 :]:
        again = " a second time" if found in chained else ""
        return f"{place} ({_brief(found)}) was inserted{again} before {_brief(chained[at])}"
    return f"{place} ({_brief(chained[at])}) was changed in {_changed(found, chained[at])}"


def _changed(found: str, chained: str) -> str:
    one, other = parse_line(0, found), parse_line(0, chained)
    if one.fault:
        return f"its text: {one.fault}"
    names = [name for name in other.fields if one.fields.get(name) != other.fields[name]]
    texts = (
        f"{each}: {other.fields[each]!r:.60} became {one.fields.get(each)!r:.60}" for each in names
    )
    return "; ".join(texts) or "its bytes"


def _brief(text: str) -> str:
    return parse_line(0, text).key[:60] or text[:60]


_DRAWN = ("seed", RANDOM_SEED)
"""A field with this value in the file has the drawn one in the chain."""


def check_config(
    config: Mapping[str, Any], name: str, records: Sequence[Record], verdict: Verdict
) -> None:
    """Name the first field of the file ``name`` that is not that of the last start of the ranks."""
    told = next((r.values["config"] for r in reversed(records) if "config" in r.values), None)
    if not isinstance(told, Mapping):
        verdict.find("the chain has no configuration")
        return
    given, run = dict(_flat(config)), dict(_flat(told))
    for each_field in sorted({*given, *run}):
        one, other = given.get(each_field), run.get(each_field)
        by_epochs = each_field == "schedule.steps" and run.get("schedule.epochs") is not None
        if one != other and (each_field, one) != _DRAWN and not by_epochs:
            verdict.find(f"{name}: {each_field} is {one!r:.60}, the run had {other!r:.60}")
            return


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def manifest_digest(checkpoint: Path) -> str:
    """Return the hash of the file DONE of a checkpoint, which has the checksums of all its files."""
    return digest((checkpoint / run_state.DONE).read_bytes())


def check_checkpoints(
    output: Path, records: Sequence[Record], deep: bool, verdict: Verdict
) -> None:
    """Name the first checkpoint that is not the one that was saved; ``deep`` also reads all its blocks.

    Blocks have CRC-32 checksums: they find damage, and not who adapts a block to its checksum.
    """
    saved = {
        (r.values.get("step"), r.values.get("manifest")) for r in records if r.kind == CHECKPOINT
    }
    steps = [step for step, _ in saved if isinstance(step, int)]
    for record in records:
        loaded = record.values.get("loaded")
        if record.kind == RESUME and isinstance(loaded, Mapping) and loaded.get("manifest"):
            step, manifest = loaded.get("step"), loaded.get("manifest")
            if step in steps and (step, manifest) not in saved:
                verdict.find(
                    f"record {record.number}: not the saved checkpoint of step {step} was resumed from"
                )
    folder = output / CHECKPOINTS_FOLDER
    present = run_state.complete(folder)
    if steps and run_state.folder_of(folder, max(steps)) not in present:
        verdict.find(f"the checkpoint of step {max(steps)}, the newest one, is not in {folder}")
    for checkpoint in present:
        step = run_state.step_of(checkpoint)
        if step not in steps:
            _unknown(checkpoint, step > max(steps, default=0), records, verdict)
        elif (step, manifest_digest(checkpoint)) not in saved:
            verdict.find(
                f"{checkpoint.name} is not the checkpoint that was saved: its DONE differs"
            )
        elif deep and (damage := _damage(checkpoint)):
            verdict.find(f"{checkpoint.name} is not the checkpoint that was saved: {damage}")


def _unknown(checkpoint: Path, is_newer: bool, records: Sequence[Record], verdict: Verdict) -> None:
    this = {"step": run_state.step_of(checkpoint), "manifest": manifest_digest(checkpoint)}
    if any(record.values.get("loaded") == this for record in records):
        return  # saved when the process was killed, and resumed from
    if is_newer and records[-1].kind != END:
        verdict.note(
            f"{checkpoint.name} has no record: the process was killed when it was complete"
        )
    else:
        verdict.find(f"{checkpoint.name} has no record: it was put there")


def _damage(checkpoint: Path) -> str:
    try:
        blocks = blocks_of(run_state.read_checksums(checkpoint))
        for block in blocks:
            if not block.is_whole_in(checkpoint):
                return f"{block.file} differs at byte {block.offset}"
    except (OSError, DataError) as error:
        return str(error)
    return ""


_CLOCKS_SECONDS = 300.0
"""The clocks of a node and of the operator differ by less."""


@dataclass(frozen=True)
class Head:
    """The operator saw that the chain had so many records, of which the last has this hash."""

    records: int
    sha256: str
    time: str
    """When it saw that, by its own clock."""


def read_heads(job: Mapping[str, Any]) -> list[Head]:
    """Return the heads in the status of ``job``, a FluxTraining; raise ConfigError if it has none."""
    status = job.get("status")
    entries = status.get("logHeads") if isinstance(status, Mapping) else None
    heads = [_head(entry) for entry in entries] if isinstance(entries, list) else []
    if not heads:
        text = (
            "has no heads of a log; give what `kubectl get fluxtraining NAME --output yaml` prints"
        )
        raise ConfigError("--status", "status.logHeads", text)
    return heads


def _head(entry: object) -> Head:
    values = entry if isinstance(entry, Mapping) else {}
    count, sha256, time = (values.get(name) for name in ("records", "sha256", "time"))
    if type(count) is not int or count < 1 or not is_digest(sha256) or not isinstance(time, str):
        raise ConfigError("status.logHeads", str(entry)[:80], "must have records, sha256 and time")
    return Head(count, str(sha256), time)


def check_heads(
    lines: Sequence[bytes],
    records: Sequence[Record | None],
    heads: Sequence[Head],
    verdict: Verdict,
) -> None:
    """Name the first of ``heads`` that the chain of ``lines`` does not have."""
    for head in sorted(heads, key=lambda each: each.records):
        place = f"record {head.records - 1}"
        if head.records > len(lines):
            verdict.find(
                f"{place} is missing: the chain has {len(lines)} records, and the operator had seen "
                f"{head.records} at {head.time}"
            )
            return
        if digest(lines[head.records - 1]) != head.sha256:
            verdict.find(
                f"{place}, or one before it, was changed after the operator saw it at {head.time}"
            )
            return
        record, seen = records[head.records - 1], _seconds(head.time)
        if record and record.time and seen and record.time > seen + _CLOCKS_SECONDS:
            verdict.find(f"{place} is of a later time than {head.time}, when the operator saw it")
            return
    if (rest := len(lines) - max(head.records for head in heads)) > 0:
        verdict.note(f"the last {rest} records are newer than the last head that the operator saw")


def _seconds(time: str) -> float | None:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


_ENDED_AGAIN = ("run_stop", "eval_start")
"""Events that a resume may remove although they are not after its checkpoint: the run goes on."""


def check_links(lines: Sequence[bytes], verdict: Verdict) -> None:
    """Name the first record that does not follow the one before it."""
    previous = NONE_BEFORE
    for index, line in enumerate(lines):
        if (fault := _fault(index, line, previous)) is not None:
            verdict.find(fault)
            return
        previous = digest(line)


def _fault(index: int, line: bytes, previous: str) -> str | None:
    place = f"record {index}"
    if line.endswith(b"\r"):
        return f"{place} ends with a carriage return: the chain was converted"
    try:
        record = parse_chain(line)
    except ValueError as error:
        return f"{place} was changed: it is no record ({error})"
    if record.number > index:
        return f"{place} is missing: record {record.number} follows record {index - 1}"
    if record.number < index:
        return f"{place} was inserted: it says that it is record {record.number}"
    if record.previous != previous:
        before = f"record {index - 1}, or one before it," if index else "the beginning"
        return f"{before} was changed: {place} follows another one"
    if (record.kind == START) != (index == 0):
        return f"{place} is a {record.kind}: a chain has one start, at its beginning"
    return None


def check_resumes(records: Sequence[Record], verdict: Verdict) -> None:
    """Name the lines that a resume removed or took up, but not because it went back to its checkpoint."""
    lines, before = list[ChainedLine](), LINE
    for record in records:
        if record.adopted:
            place = f"record {record.number} ({record.kind})"
            count = len(record.adopted)
            verdict.find(
                f"{place}: {count} lines were in the log without a record, the first of them "
                f"{_key(record.adopted[0])}: written into it between two attempts, or before it had a chain"
            )
        for number in _wrongly_dropped(lines, record, before):
            text = next(line.text for line in lines if line.number == number)
            verdict.find(
                f"record {number} ({_key(text)}): its line was removed from the log before "
                f"record {record.number} resumed the run"
            )
            break
        follow(lines, record)
        before = record.kind
        if record.values.get("torn_bytes"):
            verdict.note(
                f"record {record.number} follows one that was torn when a process was killed"
            )


def _wrongly_dropped(lines: Sequence[ChainedLine], record: Record, before: str) -> list[int]:
    """Return the records of lines that a resume without a fault would have kept."""
    if not record.dropped:
        return []
    samples = record.values.get("samples")
    samples = samples if type(samples) is int else 0
    events = [(line.number, parse_line(line.number, line.text)) for line in lines]
    if samples == 0 and not any(event.key == "run_start" for _, event in events):
        return []  # the run started over
    kept = [*takewhile(lambda each: (each[1].samples or 0) <= samples, events)]
    if before == LINE and kept and kept[-1][0] == events[-1][0]:
        kept.pop()  # the process was killed between the record and the line
    return [
        number
        for number, event in kept
        if event.key not in _ENDED_AGAIN and number in record.dropped
    ]


def _key(text: str) -> str:
    return parse_line(0, text).key or text[:40]


_PIECE_BYTES = 1 << 20
_SUFFIX = ".safetensors"


def start_facts(
    config: RunConfig,
    start: int,
    pods: Sequence[str],
    loaded: Mapping[str, object] | None,
    environment: Mapping[str, str],
) -> dict[str, object]:
    """Return the values of a start with number ``start``, whose ranks are in ``pods`` (uids).

    All of it is what the program says of itself: image and attempt are what the pod's environment has.
    """
    values = config.model_dump(mode="json")
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return {
        "start": start,
        "attempt": environment.get(ENV_ATTEMPT),
        "generation": environment.get(ENV_GENERATION),
        "image": environment.get(ENV_IMAGE),
        "pods": list(pods),
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "config": values,
        "loaded": None if loaded is None else dict(loaded),
    }


def loaded_state(output: Path, run: RunState, saved_step: int | None) -> dict[str, object] | None:
    """Return what ``run`` was loaded from, None at step 0: the checkpoint of its step, else memory."""
    if run.step == 0:
        return None
    return {
        "step": run.step,
        "manifest": _manifest(output, run.step) if run.step == saved_step else None,
    }


def checkpoint_saved(chain: Chain, output: Path, step: int) -> None:
    """Append the record of the complete checkpoint of ``step``."""
    chain.append(CHECKPOINT, durable=True, step=step, manifest=_manifest(output, step))


def _manifest(output: Path, step: int) -> str | None:
    try:
        return manifest_digest(run_state.folder_of(output / CHECKPOINTS_FOLDER, step))
    except OSError:  # removed by a newer start
        return None


def hash_weights(chain: Chain, weights: Path, stop: threading.Event) -> None:
    """Append the SHA-256 of each file of the initial ``weights``, unless ``stop`` is set meanwhile.

    For a thread of its own: the files were just loaded, so they are mostly in memory.
    """
    for path in _files(weights):
        try:
            digest = _sha256(path, stop)
            size = path.stat().st_size
        except OSError:
            digest, size = None, None
        if stop.is_set():
            return
        chain.append(WEIGHTS, file=path.name, bytes=size, sha256=digest)


def _files(weights: Path) -> Iterator[Path]:
    if weights.is_file():
        yield weights
    elif weights.is_dir():
        yield from sorted(weights.rglob(f"*{_SUFFIX}"))


def _sha256(path: Path, stop: threading.Event) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while not stop.is_set() and (piece := file.read(_PIECE_BYTES)):
            digest.update(piece)
    return digest.hexdigest()


@dataclass
class Verdict:
    """Findings, of which each means that the log cannot be believed, and notes, which do not."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: int = 0
    """Whole records of the chain."""
    head: str | None = None
    """Hash of the last one."""
    result: dict[str, object] = field(default_factory=dict)
    """Of the run, from the chained lines: status, minutes, samples, eval_loss."""

    def find(self, text: str) -> None:
        """Add a finding, on one line of printable characters."""
        self.findings.append(one_line(text))

    def note(self, text: str) -> None:
        self.notes.append(one_line(text))

    @property
    def holds(self) -> bool:
        return not self.findings


def verify(
    log: bytes,
    chain: bytes,
    heads: Sequence[Head] | None = None,
    config: tuple[str, Mapping[str, Any]] | None = None,
    output: Path | None = None,
    deep: bool = False,
) -> Verdict:
    """Return what is wrong with ``log``, whose chain is ``chain``.

    ``heads`` are those that the operator saw, ``config`` the name and the values of the file with the
    configuration, and ``output`` the folder of the run, of whose checkpoints ``deep`` reads all blocks.
    """
    verdict = Verdict()
    lines, torn = split(chain)
    verdict.records, verdict.head = len(lines), digest(lines[-1]) if lines else None
    if not lines:
        verdict.find("the chain has no record")
        return verdict
    if torn:
        verdict.note(f"the last record is torn after {len(torn)} bytes: a process was killed in it")
    check_links(lines, verdict)
    found = parsed(lines)
    records = [record for record in found if record is not None]
    if heads is None:
        verdict.note(
            "without --status: a log and a chain that were rewritten as a whole are not found"
        )
    else:
        check_heads(lines, found, heads, verdict)
    check_resumes(records, verdict)
    compare(log, records, verdict)
    verdict.result = _result(records, verdict)
    if config is not None:
        check_config(config[1], config[0], records, verdict)
    if output is not None and records:
        check_checkpoints(output, records, deep, verdict)
    return verdict


def _result(records: Sequence[Record], verdict: Verdict) -> dict[str, object]:
    """Return the result by the chained lines; find the lines that name another chain."""
    chained = [parse_line(line.number, line.text) for line in lines_of(records)]
    run = Run("chain", Path(), chained)
    names = {
        str(line.value.get("run")) for line in run.all(CHAIN_KEY) if isinstance(line.value, dict)
    }
    own = str(records[0].values.get("run")) if records else ""
    if names - {own}:
        verdict.find("the log names another chain than this one: it is that of another run")
    stop, losses = run.first("run_stop"), run.all("eval_accuracy")
    return {
        "status": None if stop is None else stop.fields["metadata"].get("status"),
        "minutes": run.minutes if run.samples is not None else None,
        "samples": run.samples,
        "eval_loss": losses[-1].value if losses else None,
    }
