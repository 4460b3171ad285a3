"""The server's log on stderr: text for people, or a JSON object in each line, with the ids of what the lines are about."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog

from etfarm.wire.errors import EtfarmError, FarmError
from etfarm.wire.escapes import in_a_line, printable


def configure(log_format: str = "text", stream: TextIO | None = None) -> None:
    """Configure the log.

    Ids that are bound to the current task (`job`, `cell`, `attempt`, `device`, `request`, `principal`) are part of each line.

    Args:
        stream: where its lines go; stderr if None.
    """
    stream = stream or sys.stderr
    renderers: list[structlog.types.Processor]
    if log_format == "json":
        renderers = [structlog.processors.EventRenamer("message"), structlog.processors.JSONRenderer()]
    elif stream.isatty():
        # Only the console renderer prints text unescaped.
        renderers = [_without_steering, structlog.dev.ConsoleRenderer()]
    else:
        renderers = [structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"])]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _with_reason,
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=stream),
    )
    if log_format == "json":
        handler = logging.StreamHandler(stream)
        handler.setFormatter(_LibraryLines())
        logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


class _LibraryLines(logging.Formatter):
    """A formatter of the libraries' records, such as those of asyncio and gRPC, so that each line of the log is JSON."""

    def format(self, record: logging.LogRecord) -> str:
        event = {"message": record.getMessage(), "level": record.levelname.lower(), "logger": record.name}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        event |= structlog.contextvars.get_contextvars()
        stamped = structlog.processors.TimeStamper(fmt="iso", utc=True)(None, "", event)
        rendered = structlog.processors.JSONRenderer()(None, "", stamped)
        return rendered if isinstance(rendered, str) else rendered.decode()


def _with_reason(_: object, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    """Replace the traceback of an error that has a reason of its own by the reason and its sentence."""
    raised = event.get("exc_info")
    error = raised if isinstance(raised, BaseException) else sys.exc_info()[1] if raised else None
    if isinstance(error, EtfarmError) and error.reason != FarmError.reason:
        del event["exc_info"]
        event["error"] = f"{error.reason}: {error}"
    return event


def _without_steering(_: object, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    """Replace control characters, which would control the terminal that shows the log; a traceback keeps its line breaks."""
    return {
        key: value if not isinstance(value, str) else printable(value) if key == "exception" else in_a_line(value)
        for key, value in event.items()
    }
