"""The result outbox: results that the server has not acknowledged, in memory and on the disk."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from etfarm.v1 import agent_pb2
from etfarm.wire.atomic_write import write_atomically

log = logging.getLogger(__name__)

_SUFFIX: Final = ".result2"
_DIGEST_BYTES: Final = 32


class ResultOutbox:
    """Results that the server has not acknowledged; their files outlive the agent and a power cut.

    Args:
        folder: holds a file for each result: the sha256 of the serialized RunResult, then the RunResult. Files that are damaged
            are deleted when the agent starts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, agent_pb2.RunResult] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
            result = _read_result(path)
            if result is not None:
                self._waiting[result.attempt_id] = result

    def __contains__(self, attempt_id: object) -> bool:
        return attempt_id in self._waiting

    @property
    def waiting(self) -> Mapping[str, agent_pb2.RunResult]:
        """Results by attempt, oldest first."""
        return self._waiting

    async def put(self, result: agent_pb2.RunResult) -> None:
        """Keep a result. If its file cannot be written, that is logged and the result lasts as long as this process."""
        self._waiting[result.attempt_id] = result
        try:
            await asyncio.to_thread(write_atomically, self._path(result.attempt_id), _encode(result), durable=True)
        except OSError as error:
            log.error("the result of attempt %s cannot be written: %s", result.attempt_id, error)
        if result.attempt_id not in self._waiting:  # the server answered while the file was being written
            self._path(result.attempt_id).unlink(missing_ok=True)

    def drop(self, attempt_id: str) -> None:
        """Discard an attempt's result, if there is one."""
        if self._waiting.pop(attempt_id, None) is not None:
            self._path(attempt_id).unlink(missing_ok=True)

    def _path(self, attempt_id: str) -> Path:
        # The server chooses the id, so it must not become a file name.
        return self._folder / f"{hashlib.sha256(attempt_id.encode()).hexdigest()[:32]}{_SUFFIX}"


def _encode(result: agent_pb2.RunResult) -> bytes:
    message = result.SerializeToString()
    return hashlib.sha256(message).digest() + message


def _read_result(path: Path) -> agent_pb2.RunResult | None:
    """Return the result that an earlier process kept; None if the file is damaged, which deletes it, or cannot be read.

    The digest decides: a truncated message may parse, and an empty file is a valid message.
    """
    try:
        data = path.read_bytes()
        digest, message = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(message).digest() == digest and path.suffix == _SUFFIX:
            return agent_pb2.RunResult.FromString(message)
        log.warning("%s is not a complete result and is deleted", path)
        path.unlink()
    except OSError as error:
        log.warning("%s cannot be read: %s", path, error)
    return None
