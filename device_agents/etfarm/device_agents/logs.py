"""The agent's log on stderr: a line of text or a JSON object for each record, with the ids of what it is about."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from etfarm.wire.escapes import in_a_line

FORMATS: Final = ("text", "json")

_CONTEXT: Final[ContextVar[Mapping[str, str]]] = ContextVar("log_context", default={})  # noqa: B039 - never changed


@contextmanager
def bound(**ids: str) -> Iterator[None]:
    """Add ids to the JSON records that this task, and tasks that it starts, write within the block."""
    token = _CONTEXT.set({**_CONTEXT.get(), **ids})
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def configure(log_format: str) -> None:
    """Write the log to stderr in one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if log_format == "json" else OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class OneLine(logging.Formatter):
    """A formatter that puts a record, traceback included, on one line without control characters.

    Instants are in UTC as ISO 8601, as in the server's log.
    """

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return in_a_line(super().format(record).replace("\n", " | "))


class _JsonLines(OneLine):
    """A formatter that makes one JSON object of a record, with the keys of the server's log."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "timestamp": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_CONTEXT.get(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)
