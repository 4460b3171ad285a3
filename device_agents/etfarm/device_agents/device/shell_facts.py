"""Facts of a device that only a shell reaches: one command line that prints them all, and what its output says.

A call of `adb shell` costs a fifth of a second, a process on a phone some milliseconds, and facts are hundreds of small files.
So one call asks for all, in the built-in commands of Android's shell as far as they go.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Iterable, Mapping
from typing import Final

MAX_BYTES: Final = 1 << 20
"""Of output: a phone's facts are a tenth of it."""
_MAX_LINES: Final = 20_000
_GLOB: Final = re.compile(r"/[\w./:+@*?\[\]-]*", re.ASCII)
_NAME: Final = re.compile(r"[^\r\n]+")
_START: Final = re.compile(rb"^etfarm-facts ([0-9a-f]{32})\r?$", re.MULTILINE)


def script(paths: Iterable[str], commands: Mapping[str, str] | None = None, *, max_bytes: int = MAX_BYTES) -> str:
    """One line for `sh -c`, whose output `split` takes. It runs in Android's mksh with toybox as well as in dash and busybox.

    What cannot be read, and the output of a command that fails, is left out. Every call frames with a word of its own, so that
    no file can pass for another. The output ends after `max_bytes` (where `head` knows no -c, as in Android 8, after 20,000
    lines); what was cut off is left out as a whole.

    Args:
        paths: absolute; with * ? [] they are expanded on the device.
        commands: lines for the shell by the names of their facts. They get no input, and what they say on stderr is lost.

    Raises:
        ValueError: a path has other characters than paths of facts have, or a name is no line.
    """
    listed = list(paths)
    if (odd := next((path for path in listed if not _GLOB.fullmatch(path)), None)) is not None:
        raise ValueError(f"{odd!r} is no path of a fact")
    if (odd := next((name for name in commands or () if not _NAME.fullmatch(name)), None)) is not None:
        raise ValueError(f"{odd!r} is no name of a fact")
    # `cat` and `echo` are built into mksh: no process for each file. The blank line behind a text ends its last line, if need be.
    parts = [f"t={secrets.token_hex(16)}", 'echo "etfarm-facts $t"']
    if listed:
        read = 'echo "$t + $f"; if cat "$f"; then r=0; else r=1; fi; echo; echo "$t - $r"'
        parts.append(f'for f in {" ".join(listed)}; do if [ -r "$f" ]; then {read}; fi; done')
    for name, command in (commands or {}).items():
        parts.append(f'f={shlex.quote(name)}; echo "$t + $f"; if ( {command} ); then r=0; else r=1; fi; echo; echo "$t - $r"')
    bound = f'b="head -c {max_bytes}"; $b </dev/null >/dev/null 2>&1 || b="head -n {_MAX_LINES}"'
    return f"{bound}; {{ {'; '.join(parts)}; }} </dev/null 2>/dev/null | $b"


def split(output: bytes | str) -> dict[str, str]:
    """The facts, by path or name, that `script` printed; empty where it did not run.

    Bytes that are no UTF-8 become U+FFFD. Where a terminal made CR LF of the ends of lines, they are LF again.
    """
    if isinstance(output, str):
        output = output.encode(errors="surrogateescape")
    start = _START.search(output)
    if start is None:
        return {}
    token, behind = start.group(1), output[start.end() :]
    if start.group().endswith(b"\r"):
        behind = behind.replace(b"\r\n", b"\n")
    framed = re.compile(rb"%b \+ ([^\n]+)\n(.*?)\n%b - 0$" % (token, token), re.MULTILINE | re.DOTALL)
    facts = {}
    for section in re.split(rb"^(?=%b \+ )" % token, behind, flags=re.MULTILINE):
        if (match := framed.match(section)) is not None:
            name, text = (part.decode(errors="replace") for part in match.groups())
            facts[name] = text
    return facts
