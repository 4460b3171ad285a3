"""SQL that SQLite and PostgreSQL write differently."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, String, bindparam, select
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction, ReturnTypeFromArgs

__all__ = ["Insert", "among", "greatest", "insert", "position_of", "stored_size"]

# PostgreSQL's `INSERT ... ON CONFLICT` is what SQLite has copied: one construct compiles for both.


class greatest(ReturnTypeFromArgs[Any]):
    """The greatest of several values."""

    inherit_cache = True
    name = "greatest"


class position_of(GenericFunction[int]):
    """The position, from 1 on, of the second text in the first; 0 if it is not there."""

    inherit_cache = True
    name = "strpos"


class stored_size(GenericFunction[int]):
    """The number of bytes that a value takes, which PostgreSQL compresses if it is large."""

    inherit_cache = True
    name = "pg_column_size"


@compiles(stored_size, "sqlite")
def _stored_size(element: stored_size, compiler: SQLCompiler, **options: Any) -> str:
    return f"length{compiler.process(element.clause_expr, **options)}"


@compiles(greatest, "sqlite")
def _greatest(element: greatest, compiler: SQLCompiler, **options: Any) -> str:
    return f"max{compiler.process(element.clause_expr, **options)}"


@compiles(position_of, "sqlite")
def _position_of(element: position_of, compiler: SQLCompiler, **options: Any) -> str:
    return f"instr{compiler.process(element.clause_expr, **options)}"


def among(column: ColumnElement[str], name: str) -> ColumnElement[bool]:
    """Return the condition that a column has one of the texts in a JSON list, the parameter `name`."""
    return column.in_(select(_json_texts(bindparam(name, type_=String)).table_valued("value").c.value))


class _json_texts(GenericFunction[str]):
    inherit_cache = True
    name = "etfarm_json_texts"


@compiles(_json_texts, "sqlite")
def _on_sqlite(element: _json_texts, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_each{compiler.process(element.clause_expr, **options)}"


@compiles(_json_texts, "postgresql")
def _on_postgresql(element: _json_texts, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_array_elements_text(CAST({compiler.process(element.clauses, **options)} AS json))"
