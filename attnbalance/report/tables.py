"""Tables: a comparison as JSON for curves and recall, and as Parquet for single readings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnbalance.outputs import replacing
from attnbalance.readings.compare import Comparison
from attnbalance.readings.intervals import Interval, finite
from attnbalance.readings.reading import Reading
from attnbalance.readings.recall import Recall

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 1_000_000
"""Rows of a record batch, at most (and at least one prompt): 20 MB."""


def curves_json(comparison: Comparison) -> dict[str, Any]:
    """The content of `curves.json`: each label's curve with its 95% interval; a bound that is not known is null."""
    curves = comparison.curves()
    return {
        "name": comparison.measured[0].attention.name,
        "reduce": comparison.reduce,
        "curves": [{"label": label} | curve.as_dict() for label, curve in curves.items()],
    }


def recall_json(comparison: Comparison) -> list[dict[str, Any]]:
    """The content of `recall.json`: accuracy of each label whose recall was measured, overall and by popularity.

    `by_popularity` holds one entry for each fifth of the prompts with known popularity, most popular first (quintile
    0), and `top_percentiles` the accuracy on the x% most popular ones. Accuracies and rates lie in [0, 1].
    """
    return [
        {"label": one.label} | _recall(one.recall, comparison.seed)
        for one in comparison.measured
        if one.recall is not None
    ]


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


def _accuracy(found: Interval) -> dict[str, Any]:
    return {"accuracy": found.mean, "low": finite(found.low), "high": finite(found.high), "n": found.n}


def _recall(recall: Recall, seed: int) -> dict[str, Any]:
    rate = recall.shortcut_rate(seed)
    return _accuracy(recall.accuracy(seed)) | {
        "shortcut_rate": None if rate is None else rate.mean,
        "shortcut_low": None if rate is None else finite(rate.low),
        "shortcut_high": None if rate is None else finite(rate.high),
        "wrong": recall.correct.count(False),
        "by_popularity": [
            {"quintile": place, "popularity_low": low, "popularity_high": high} | _accuracy(found)
            for place, ((low, high), found) in enumerate(recall.by_quintile(seed))
        ],
        "top_percentiles": [{"percent": x} | _accuracy(found) for x, found in recall.by_top_percentile(seed)],
    }


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
    places = [{word: i for i, word in enumerate(column)} for column in words]
    dictionaries = [pa.array(column, pa.string()) for column in words]
    for label, reading in readings:
        prompts = np.array([places[2][name] for name in reading.prompt_ids], dtype=np.int32)
        layers, (n_layers, n_heads) = np.array(reading.layers, dtype=np.int32), reading.values.shape[1:]
        step = max(1, BATCH_ROWS // max(1, n_layers * n_heads))
        for start in range(0, len(prompts), step):
            values = reading.values[start : start + step].numpy()
            columns = np.broadcast_arrays(
                np.int32(places[0][label]),
                np.int32(places[1][reading.name]),
                prompts[start : start + step, None, None],
                layers[:, None],
                np.arange(n_heads, dtype=np.int32),
                values,
            )
            flat = [np.ascontiguousarray(column).ravel() for column in columns]
            coded = [pa.DictionaryArray.from_arrays(c, d) for c, d in zip(flat[:3], dictionaries, strict=True)]
            yield pa.record_batch([*coded, *map(pa.array, flat[3:])], schema=_schema())
