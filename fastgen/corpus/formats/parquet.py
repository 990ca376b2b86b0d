"""Conversion of JSON lines to Parquet, one group of rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastgen.corpus.models import need

_ROWS = 8192


def of_json_lines(lines: Path, output: Path) -> None:
    """Convert a file of JSON objects to Parquet.

    A column gets the type that holds all of its values. If there is none, its values are stored as
    JSON text.
    """
    need("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    types: dict[str, Any] = {}
    for rows in _groups(lines):
        for name in dict.fromkeys(name for row in rows for name in row):
            types[name] = _wider(
                types.get(name, pa.null()), _type_of([row.get(name) for row in rows])
            )
    types = {name: kind if _storable(kind) else pa.string() for name, kind in types.items()}
    schema = pa.schema(types)
    with pq.ParquetWriter(output, schema) as writer:
        for rows in _groups(lines):
            columns = [
                _array([row.get(name) for row in rows], kind) for name, kind in types.items()
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _groups(lines: Path) -> Iterator[list[dict[str, Any]]]:
    with lines.open("rb") as stream:
        while rows := [_row(line) for _, line in zip(range(_ROWS), stream, strict=False)]:
            yield rows


def _row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    return _storable_text(row) if b"\\ud" in line else row


def _storable_text(value: Any) -> Any:
    """Replace unpaired surrogates, which UTF-8 cannot encode, in all texts of a value."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_storable_text(name): _storable_text(each) for name, each in value.items()}
    return [_storable_text(each) for each in value] if isinstance(value, list) else value


def _type_of(values: list[Any]) -> Any:
    import pyarrow as pa

    try:
        return pa.array(values).type
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return pa.string()


def _wider(one: Any, other: Any) -> Any:
    """Return a type that holds the values of both types."""
    import pyarrow as pa

    try:
        fields = [pa.schema([("", kind)]) for kind in (one, other)]
        return pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except (pa.ArrowException, TypeError):
        return pa.string()


def _storable(kind: Any) -> bool:
    """Return whether Parquet can store a type; it cannot store structs without fields."""
    import pyarrow as pa

    if pa.types.is_struct(kind) and kind.num_fields == 0:
        return False
    return all(_storable(kind.field(i).type) for i in range(kind.num_fields))


def _array(values: list[Any], kind: Any) -> Any:
    import pyarrow as pa

    if kind == pa.string():
        values = [
            value if value is None or isinstance(value, str) else json.dumps(value)
            for value in values
        ]
    if pa.types.is_floating(kind):
        values = [value if value is None else float(value) for value in values]
    return pa.array(values, kind)
