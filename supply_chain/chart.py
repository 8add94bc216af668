"""The chart as the archive that Helm installs; the same files give the same bytes."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path


def write_chart(chart: Path, archive: Path, seconds: int) -> None:
    """Write the folder ``chart`` to ``archive``; all files get the time ``seconds`` after 1970."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(chart.rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(f"{chart.name}/{path.relative_to(chart).as_posix()}")
                entry.size, entry.mtime, entry.mode = path.stat().st_size, seconds, 0o644
                tar.addfile(entry, io.BytesIO(path.read_bytes()))
    with archive.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(content.getvalue())
