"""Cleaning CC12M compared with the MLPerf reference: samples/s per core and peak memory, equal pixels.

Both read the same raw tars of JPEGs, with sides of 200 to 900 pixels, with one worker. Rates are samples per
second of processor time, imports included, which depends little on other programs.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
from benchmarks.peers import ROOT, peers_python
from benchmarks.table import print_table
from PIL import Image

from fluxtrain.data.images import TarImages

TAR_SIZE = 100
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Usage:
    """Processor seconds of every process of a session, and their peak memory in total."""

    seconds: dict[int, float] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def total_seconds(self) -> float:
        """Return the processor seconds of all processes."""
        return sum(self.seconds.values())


def photos(count: int) -> Iterator[bytes]:
    """Yield random JPEGs as detailed as photographs, with sides of 200 to 900 pixels."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        width, height = (int(side) for side in rng.integers(200, 900, 2))
        coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=int)
        noisy = (smooth + rng.integers(-6, 7, smooth.shape)).clip(0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noisy).save(buffer, "JPEG", quality=90)
        yield buffer.getvalue()


def write_raw(folder: Path, count: int) -> None:
    """Write a raw set of ``count`` samples."""
    folder.mkdir()
    numbered = enumerate(photos(count))
    for number in range(-(-count // TAR_SIZE)):
        with tarfile.open(folder / f"cc12m-train-{number:04d}.tar", "w") as tar:
            for index, photo in islice(numbered, TAR_SIZE):
                for suffix, content in {"jpg": photo, "txt": f"caption {index}".encode()}.items():
                    header = tarfile.TarInfo(f"{index:09d}.{suffix}")
                    header.size = len(content)
                    tar.addfile(header, io.BytesIO(content))


def measure(command: list[str]) -> tuple[float, Usage]:
    """Run ``command`` in its own session; return its seconds and its usage."""
    begin, usage = perf_counter(), Usage()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, usage, stop))
    watcher.start()
    code = process.wait()
    stop.set()
    watcher.join()
    if code:
        raise SystemExit(f"{command}: exit code {code}")
    return perf_counter() - begin, usage


def _watch(session: int, usage: Usage, stop: threading.Event) -> None:
    while not stop.wait(0.02):
        memory = 0
        for path in Path("/proc").glob("[0-9]*"):
            try:
                values = (path / "stat").read_text().rpartition(")")[2].split()
                if int(values[3]) != session:
                    continue
                usage.seconds[int(path.name)] = (int(values[11]) + int(values[12])) / _TICKS
                memory += _proportional_bytes(path)
            except (OSError, ValueError):
                continue  # the process has ended
        usage.peak_bytes = max(usage.peak_bytes, memory)


def _proportional_bytes(path: Path) -> int:
    """Return the proportional set size of a process."""
    for line in (path / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def num_different(ours: Path, theirs: Path) -> int:
    """Return the number of our samples that are not bit-equal to ``theirs``, raw RGB files by key."""
    dataset = TarImages(ours)
    keys = {dataset.key(i): i for i in range(len(dataset))}
    assert keys.keys() == {path.stem for path in theirs.glob("*.rgb")}
    return sum(
        dataset.image(i).permute(1, 2, 0).numpy().tobytes() != (theirs / f"{key}.rgb").read_bytes()
        for key, i in keys.items()
    )


def main(arguments: list[str] | None = None) -> None:
    """Write a raw set in a temporary folder, clean it with both, and compare."""
    parser = argparse.ArgumentParser(prog="benchmarks.data.clean", description=__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    options, _ = parser.parse_known_args(arguments)
    reference = [str(peers_python()), "-W", "ignore", "-m", "benchmarks.data.clean_reference"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_raw(folder / "raw", options.samples)
        program = [sys.executable, "-m", "fluxtrain.cli", "prepare", "cc12m", "--workers", "1"]
        paths = ["--input", str(folder / "raw"), "--output", str(folder / "ours")]
        results = {
            "fluxtrain": measure([*program, *paths, "--samples", "all"]),
            "datasets + torchvision (MLPerf reference)": measure([*reference, str(folder)]),
        }
        subprocess.run([*reference, str(folder), "--dump"], cwd=ROOT, check=True)
        print(f"samples that differ: {num_different(folder / 'ours', folder / 'dump')}")
    rows = [
        [
            name,
            f"{options.samples / usage.total_seconds:.1f}",
            f"{seconds:.1f}",
            f"{usage.peak_bytes / 2**20:.0f}",
        ]
        for name, (seconds, usage) in results.items()
    ]
    print_table(
        f"cleaning {options.samples} raw samples, one worker",
        ["", "samples/s per core", "seconds in all", "peak MiB"],
        rows,
    )


if __name__ == "__main__":
    main()
