"""Facts of a device that only a shell can read: one command line that prints them all, and the parser of its output.

A call of `adb shell` costs a fifth of a second, a process on a phone some milliseconds, and facts are hundreds of small files. So
one call reads them all, with built-in commands of Android's shell where possible.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Iterable, Mapping
from typing import Final

MAX_BYTES: Final = 1 << 20
"""Output limit in bytes: a phone's facts take a tenth of it."""
_MAX_LINES: Final = 20_000
_GLOB: Final = re.compile(r"/[\w./:+@*?\[\]-]*", re.ASCII)
_NAME: Final = re.compile(r"[^\r\n]+")
_START: Final = re.compile(rb"^etfarm-facts ([0-9a-f]{32})\r?$", re.MULTILINE)


def script(paths: Iterable[str], commands: Mapping[str, str] | None = None, *, max_bytes: int = MAX_BYTES) -> str:
    """Return one line for `sh -c`, whose output `split` parses. It runs in Android's mksh with toybox, dash and busybox.

    Unreadable files and the output of failing commands are left out. Every call uses a random delimiter, so that no file can
    imitate another. The output ends after `max_bytes` (if `head` does not know -c, as in Android 8, after 20,000 lines); a
    truncated fact is left out as a whole.

    Args:
        paths: absolute; with * ? [] they are expanded on the device.
        commands: shell lines by the names of their facts. They get no input, and their stderr is discarded.
        max_bytes: limit of the output.

    Raises:
        ValueError: a path has unexpected characters, or a name is not a single line.
    """
    listed = list(paths)
    if (odd := next((path for path in listed if not _GLOB.fullmatch(path)), None)) is not None:
        raise ValueError(f"{odd!r} is not a path of a fact")
    if (odd := next((name for name in commands or () if not _NAME.fullmatch(name)), None)) is not None:
        raise ValueError(f"{odd!r} is not a name of a fact")
    # `cat` and `echo` are built into mksh, which avoids a process per file. The blank line after a text ends its last line if
    # necessary.
    parts = [f"t={secrets.token_hex(16)}", 'echo "etfarm-facts $t"']
    if listed:
        read = 'echo "$t + $f"; if cat "$f"; then r=0; else r=1; fi; echo; echo "$t - $r"'
        parts.append(f'for f in {" ".join(listed)}; do if [ -r "$f" ]; then {read}; fi; done')
    for name, command in (commands or {}).items():
        parts.append(f'f={shlex.quote(name)}; echo "$t + $f"; if ( {command} ); then r=0; else r=1; fi; echo; echo "$t - $r"')
    bound = f'b="head -c {max_bytes}"; $b </dev/null >/dev/null 2>&1 || b="head -n {_MAX_LINES}"'
    return f"{bound}; {{ {'; '.join(parts)}; }} </dev/null 2>/dev/null | $b"


def split(output: bytes | str) -> dict[str, str]:
    """Return the facts, by path or name, that `script` printed; empty if it did not run.

    Bytes that are not UTF-8 become U+FFFD. CR LF line ends, which a terminal produces, become LF.
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
