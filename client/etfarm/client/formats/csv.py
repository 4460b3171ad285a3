"""Operators or samples as CSV (RFC 4180, UTF-8, a header, dots as decimal points).

Null is empty, booleans are true and false, lists are JSON; numbers are as exact as in the document. Text that a spreadsheet
would evaluate gets an apostrophe in front, since other people choose names and code.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from etfarm.client.formats import tables
from etfarm.wire.escapes import spreadsheet_cell, spreadsheet_text

Json = Mapping[str, Any]


def write(document: Json, what: str = "operators") -> bytes:
    """Return one table of a document.

    Args:
        what: a name in `tables.WHAT`.
    """
    table = tables.table(document, what)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(table.columns)
    writer.writerows([_cell(value) for value in row] for row in table.rows)
    return text.getvalue().encode()


def read(data: bytes, what: str = "operators") -> list[dict[str, Any]]:
    """Return the rows that `write` wrote, with the document's values; an empty text becomes null."""
    columns = tables.table({"job": None, "reports": []}, what).columns
    rows = csv.DictReader(io.StringIO(data.decode(), newline=""))
    return [{name: _value(row[name], kind) for name, kind in columns.items()} for row in rows]


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return json.dumps(list(value), ensure_ascii=False)
    return spreadsheet_cell(value) if isinstance(value, str) else value


def _value(text: str, kind: tables.Kind) -> Any:
    if text == "":
        return None
    match kind:
        case tables.Kind.INTEGER:
            return int(text)
        case tables.Kind.NUMBER:
            return float(text)
        case tables.Kind.TRUTH:
            return text == "true"
        case tables.Kind.TEXTS | tables.Kind.INTEGERS:
            return json.loads(text)
    return spreadsheet_text(text)
