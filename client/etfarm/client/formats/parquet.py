"""Operators or samples as Parquet, for pandas, Polars and DuckDB.

It needs etfarm[parquet].
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from etfarm.client.errors import extra_missing
from etfarm.client.formats import tables
from etfarm.wire.report import SCHEMA

Json = Mapping[str, Any]


def write(document: Json, what: str = "operators") -> bytes:
    """Return one table of a document.

    Each column has its type, lists are lists, null is null. The metadata names the schema.

    Args:
        what: a name in `tables.WHAT`.

    Raises:
        EXTRA_MISSING: pyarrow is not installed.
    """
    must_be_there()
    import pyarrow
    import pyarrow.parquet

    types = {
        tables.Kind.TEXT: pyarrow.string(),
        tables.Kind.INTEGER: pyarrow.int64(),
        tables.Kind.NUMBER: pyarrow.float64(),
        tables.Kind.TRUTH: pyarrow.bool_(),
        tables.Kind.TEXTS: pyarrow.list_(pyarrow.string()),
        tables.Kind.INTEGERS: pyarrow.list_(pyarrow.int64()),
    }
    table = tables.table(document, what)
    schema = pyarrow.schema([(name, types[kind]) for name, kind in table.columns.items()], {"schema": f"{SCHEMA} {what}"})
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, schema=schema), file, compression="zstd")
    return file.getvalue()


def must_be_there() -> None:
    """Check that Parquet can be written here.

    Raises:
        EXTRA_MISSING: pyarrow is not installed.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise extra_missing("Parquet", "parquet", "pyarrow") from None
