"""Limits of the models of a job, which clients keep and servers check."""

from __future__ import annotations

from typing import Final

MAX_CALLS: Final = 64
"""Maximum number of calls by which a program is compared with its model."""

MAX_SOURCES: Final = 1000
"""Maximum number of source files of one model."""

MAX_SOURCE_PATH: Final = 400
"""Maximum number of characters of a source file's path."""
