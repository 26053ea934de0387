"""Readings as one table, number by number, in memory or as a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnbalance.files.outputs import replacing
from attnbalance.readings.reading import Reading

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 1_000_000
"""Rows of a record batch, at most (and at least one prompt): 20 MB."""


def readings_table(readings: Sequence[tuple[str, Reading]]) -> pa.Table:
    """Every single number that was read: columns label, reading, prompt_id, layer, head, value (see `write_readings`).

    Takes 24 bytes a number in memory; for many prompts of a large model write it with `write_readings` instead.
    """
    import pyarrow as pa

    return pa.Table.from_batches(list(_batches(readings)), schema=_schema())


def write_readings(readings: Sequence[tuple[str, Reading]], path: Path) -> None:
    """Write `readings_table` to a Parquet file, a batch of prompts at a time, whole or not at all."""
    import pyarrow.parquet as pq

    with replacing(path) as temporary, pq.ParquetWriter(temporary, _schema(), compression="zstd") as writer:
        for batch in _batches(readings):
            writer.write_batch(batch)


def _schema() -> pa.Schema:
    import pyarrow as pa

    words = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            *((name, words) for name in ("label", "reading", "prompt_id")),
            ("layer", pa.int32()),
            ("head", pa.int32()),
            ("value", pa.float32()),
        ]
    )


def _batches(readings: Sequence[tuple[str, Reading]]) -> Iterator[pa.RecordBatch]:
    """Record batches of whole prompts, reading by reading; all share one dictionary for each column of words."""
    import pyarrow as pa

    words = [
        list(dict.fromkeys(label for label, _ in readings)),
        list(dict.fromkeys(reading.name for _, reading in readings)),
        list(dict.fromkeys(name for _, reading in readings for name in reading.prompt_ids)),
    ]
    codes = [{word: i for i, word in enumerate(column)} for column in words]
    dictionaries = [pa.array(column, pa.string()) for column in words]
    for label, reading in readings:
        prompts = np.array([codes[2][name] for name in reading.prompt_ids], dtype=np.int32)
        layers, (n_layers, n_heads) = np.array(reading.layers, dtype=np.int32), reading.values.shape[1:]
        step = max(1, BATCH_ROWS // max(1, n_layers * n_heads))
        for start in range(0, len(prompts), step):
            values = reading.values[start : start + step].numpy()
            columns = np.broadcast_arrays(
                np.int32(codes[0][label]),
                np.int32(codes[1][reading.name]),
                prompts[start : start + step, None, None],
                layers[:, None],
                np.arange(n_heads, dtype=np.int32),
                values,
            )
            flat = [np.ascontiguousarray(column).ravel() for column in columns]
            coded = [pa.DictionaryArray.from_arrays(c, d) for c, d in zip(flat[:3], dictionaries, strict=True)]
            yield pa.record_batch([*coded, *map(pa.array, flat[3:])], schema=_schema())
