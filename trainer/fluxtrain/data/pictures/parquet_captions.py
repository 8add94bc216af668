"""The rows of a parquet file of captions, read within bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fluxtrain.data.layouts.arrow import short_message
from fluxtrain.data.layouts.parquet import shared_values
from fluxtrain.data.layouts.parquet_pages import CONTAINER_LIMIT, check_pages
from fluxtrain.errors import DataError

_ROWS_AT_ONCE = 1 << 14
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``path`` with those of ``columns`` that it has; equal texts are one object.

    Raises DataError if it is damaged, has other types than texts, or would need much more memory than it has
    bytes.
    """
    try:
        check_pages(path, columns)
        schema = pq.read_schema(path)
        wanted = [name for name in columns if name in schema.names]
        for name in wanted:
            _require_text(path, name, schema.field(name).type)
        file = pq.ParquetFile(
            path, read_dictionary=wanted, thrift_container_size_limit=CONTAINER_LIMIT
        )
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=wanted, use_threads=False):
            batch.validate(full=True)
            values = [shared_values(pa.chunked_array([batch[name]])) for name in wanted]
            for row in zip(*values, strict=True):
                yield dict(zip(wanted, row, strict=True))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: is not Parquet ({short_message(error)})") from None


def _require_text(path: Path, name: str, kind: Any) -> None:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in _TEXTS and not pa.types.is_null(kind):
        raise DataError(f"{path}: column {name!r} is {str(kind)[:80]}, not a text")
