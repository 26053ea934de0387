"""The table of readings, in memory and as Parquet, against a naive loop."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from attnbalance.report import readings_table as tables
from attnbalance.report.readings_table import readings_table, write_readings
from tests.fakes import a_comparison

ATTENTION = {"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.4]}
MADE = a_comparison(ATTENTION, {"top": [i < 30 for i in range(40)]})
READINGS = [(measured.label, measured.reading()) for measured in MADE.measured]
COLUMNS = ["label", "reading", "prompt_id", "layer", "head", "value"]


def _naive_rows(comparison):
    return [
        (measured.label, measured.reading().name, prompt_id, layer, head, measured.reading().values[i, j, head].item())
        for measured in comparison.measured
        for i, prompt_id in enumerate(measured.reading().prompt_ids)
        for j, layer in enumerate(measured.reading().layers)
        for head in range(measured.reading().values.shape[2])
    ]


def test_the_readings_table_holds_every_number_at_its_place():
    table = readings_table(READINGS)
    assert [str(kind) for kind in table.schema.types[3:]] == ["int32", "int32", "float"]
    assert [pa.types.is_dictionary(kind) for kind in table.schema.types[:3]] == [True, True, True]
    rows = list(zip(*(table[name].to_pylist() for name in COLUMNS), strict=True))
    assert rows == _naive_rows(MADE)


def test_parquet_written_in_many_batches_reads_back_as_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BATCH_ROWS", 50)
    path = tmp_path / "readings.parquet"
    write_readings(READINGS, path)
    assert pq.ParquetFile(path).metadata.num_row_groups > 2
    read = pq.read_table(path)
    assert read.column_names == COLUMNS
    rows = list(zip(*(column.to_pylist() for column in read.columns), strict=True))
    assert rows == _naive_rows(MADE)
    assert [p.name for p in tmp_path.iterdir()] == ["readings.parquet"]
