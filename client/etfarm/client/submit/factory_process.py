"""A process of its own for a factory: its modules register operators, or cannot be loaded twice in one process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol

from etfarm.client.export.errors import FactoryFailed
from etfarm.client.submit.prepared import PreparedModel
from etfarm.v1 import common_pb2
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_proto, to_proto

if TYPE_CHECKING:
    from etfarm.client.export.spec import FileFactory, ModuleFactory

_SAY, _EXPORT, _DONE, _FAILED = "say", "export", "done", "failed"


class Steps(Protocol):
    """The export of a factory's model, which is sent to the process: `preparation.ExportSteps`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def say(self) -> Callable[[str], None] | None:
        """Called with the process's sentences."""

    @property
    def on_export(self) -> Callable[[str], None] | None:
        """Called with the model's name before it is exported."""

    def here(self, spec: FileFactory | ModuleFactory, name: str) -> PreparedModel:
        """Export the model in the process."""


def prepare_apart(steps: Steps, spec: FileFactory | ModuleFactory, name: str, why: str = "") -> PreparedModel:
    """Call a factory and export its model in a new process, with the working folder and sys.path of this one.

    What the factory prints goes to stderr. The process ends with this one, which alone receives Ctrl-C.

    Args:
        steps: the export.
        spec: the factory.
        name: the model's name.
        why: the reason for a process, as a clause; that its file registers operators when empty.

    Raises:
        EtfarmError: as raised there.
        FactoryFailed: the process ended without an answer.
    """
    where = f"{getattr(spec, 'path', None) or getattr(spec, 'module', '')}:{spec.name}"
    if steps.say is not None:
        steps.say(f"Loading {where} in a process of its own, since {why or 'operators are registered once in a process'}.")
    request = pickle.dumps((replace(steps, say=None, on_export=None), spec, name))
    # Safe path: files of the working folder must not stand in for Python's own modules while the process starts.
    command = [sys.executable, "-P", "-m", "etfarm.client.submit.factory_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(sys.path, process.stdin)
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            return _answer(process.stdout, steps)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            process.kill()
            code = process.wait()
            ended = f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
            raise FactoryFailed(where, RuntimeError(ended), "", "Its output on stderr may say why.") from None
        except BaseException:
            process.kill()
            raise
        finally:
            with suppress(BrokenPipeError):  # what it did not read is still to be written
                process.stdin.close()


def _answer(messages: IO[bytes], steps: Steps) -> PreparedModel:
    """Pass messages on until the answer, and return it."""
    while True:
        kind, value = pickle.load(messages)
        if kind == _SAY and steps.say is not None:
            steps.say(value)
        elif kind == _EXPORT and steps.on_export is not None:
            steps.on_export(value)
        elif kind == _DONE:
            prepared: PreparedModel = value
            return prepared
        elif kind == _FAILED:
            raise from_proto(common_pb2.Error.FromString(value))


def _serve() -> None:
    """Answer the one request on stdin, and end early if the other process does."""
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the factory prints must not stand between the messages

    def send(kind: str, value: object) -> None:
        pickle.dump((kind, value), messages)
        messages.flush()

    requests = os.fdopen(os.dup(0), "rb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.path[:] = pickle.load(requests)
    steps, spec, name = pickle.loads(pickle.load(requests))

    def end_with_parent() -> None:
        requests.read()
        os._exit(1)

    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    own = replace(steps, say=lambda text: send(_SAY, text), on_export=lambda text: send(_EXPORT, text))
    try:
        prepared = own.here(spec, name)
    except EtfarmError as error:
        send(_FAILED, to_proto(error).SerializeToString())
    else:
        send(_DONE, prepared)


if __name__ == "__main__":
    _serve()
    sys.stderr.flush()
    os._exit(0)  # torch does not reliably survive the interpreter's shutdown
