#!/usr/bin/env python
"""Generate the parts of docs/ that come from the code: blocks between `<!-- generated: NAME -->` and `<!-- end -->`.

.venv/bin/python docs/generate.py          # writes them
.venv/bin/python docs/generate.py --check  # a gate: exit code 1 where a page is not what the code gives
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import inspect
import io
import os
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args, get_type_hints

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

    from etfarm.wire.report_keys import Key

DOCS: Final = Path(__file__).resolve().parent
ROOT: Final = DOCS.parent
PACKAGES: Final = ("proto", "client", "server", "device_agents")

_ERROR_TABLE: Final = ROOT / "proto" / "etfarm" / "wire" / "error_table.py"
_BLOCK: Final = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HOME: Final = "/home/you"
"""The home folder while help texts are made: their defaults name it, and lines break by its length."""
_ENVIRONMENT: Final = {"HOME": _HOME, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "LANG": "C.UTF-8"}


# --- error reasons ---------------------------------------------------------------------------------------------------

_FAULTS: Final = {"UserError": "user", "DeviceError": "device", "FarmError": "farm"}


def find_reasons() -> dict[str, set[str]]:
    """Return the reasons that the packages' error classes carry, each with its faults: user, device or farm."""
    bases: dict[str, set[str]] = defaultdict(set)
    for _, node in _classes():
        bases[node.name] |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    reasons: dict[str, set[str]] = defaultdict(set)
    for _, node in _classes():
        for reason in _reasons_of(node):
            reasons[reason] |= _faults_of(node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases}, bases)
    for reason, row in find_rows().items():
        reasons[reason].add(row.split()[0].lower())
    return dict(reasons)


def find_carriers() -> dict[str, list[str]]:
    """Return the classes that declare each reason, as `etfarm.wire.errors:Unauthenticated`."""
    carriers: dict[str, list[str]] = defaultdict(list)
    for module, node in _classes():
        for reason in _reasons_of(node):
            carriers[reason].append(f"{module}:{node.name}")
    return dict(carriers)


@functools.cache
def _classes() -> list[tuple[str, ast.ClassDef]]:
    """Return all classes of the packages, each with its module's name."""
    classes: list[tuple[str, ast.ClassDef]] = []
    for package in PACKAGES:
        for file in sorted((ROOT / package / "etfarm").rglob("*.py")):
            if not file.stem.endswith(("_pb2", "_pb2_grpc")):
                module = ".".join(file.relative_to(ROOT / package).with_suffix("").parts).removesuffix(".__init__")
                classes += [(module, node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
    return classes


def _reasons_of(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if any(isinstance(target, ast.Name) and target.id == "reason" for target in targets):
            value = statement.value  # type: ignore[attr-defined]  # both kinds of assignment have one
            if isinstance(value, ast.Constant) and re.fullmatch(r"[A-Z][A-Z0-9_]+", str(value.value)):
                yield str(value.value)


def _faults_of(name: str, own_bases: set[str], bases: dict[str, set[str]]) -> set[str]:
    faults: set[str] = set()
    seen: set[str] = set()
    waiting = {name, *own_bases} if name in _FAULTS else set(own_bases)
    while waiting:
        current = waiting.pop()
        if current in _FAULTS:
            faults.add(_FAULTS[current])
        elif current not in seen:
            seen.add(current)
            waiting |= bases.get(current, set())
    return faults


def read_explanations() -> dict[str, dict[str, Any]]:
    """Return the groups of reasons.toml: `title`, `about`, and for each reason [what happened, what to do].

    A reason without a class of its own has [..., its fault, its kind, and the keys of its metadata].
    """
    return tomllib.loads((DOCS / "reasons.toml").read_text())


def find_rows() -> dict[str, str]:
    """Return the reasons without a class of their own, each with its fault, its kind, and the keys of its metadata."""
    groups = read_explanations().values()
    return {reason: texts[2] for group in groups for reason, texts in group.items() if reason.isupper() and len(texts) > 2}


def make_error_table() -> str:
    """Make the module that `error_for` reads."""
    rows = "".join(f'    "{reason}": "{row}",\n' for reason, row in sorted(find_rows().items()))
    return (
        '"""Errors that have no class of their own, generated by docs/generate.py from reasons.toml: fault, kind, keys."""\n\n'
        "from collections.abc import Mapping\nfrom typing import Final\n\n"
        f"ROWS: Final[Mapping[str, str]] = {{\n{rows}}}\n"
    )


def make_reasons() -> str:
    """Make a table of reasons for each group of reasons.toml."""
    faults = find_reasons()
    explained = {reason for group in read_explanations().values() for reason in group if reason.isupper()}
    if missing := sorted(faults.keys() - explained):
        raise SystemExit(f"docs/reasons.toml does not explain {', '.join(missing)}")
    if stale := sorted(explained - faults.keys()):
        raise SystemExit(f"docs/reasons.toml explains {', '.join(stale)}, which no class carries")
    parts = []
    for group in read_explanations().values():
        parts += [
            f"## {group['title']}",
            "",
            group["about"],
            "",
            "| reason | fault | what happened | what to do |",
            "|---|---|---|---|",
        ]
        for reason in sorted(reason for reason in group if reason.isupper()):
            happened, remedy = (text.replace("|", "\\|") for text in group[reason][:2])
            whose = ", ".join(sorted(faults[reason])) or "any"
            parts.append(f'| <a id="{reason}"></a>`{reason}` | {whose} | {happened} | {remedy} |')
        parts.append("")
    return "\n".join(parts)


# --- commands --------------------------------------------------------------------------------------------------------


def make_commands() -> str:
    """Make a section with the help text of each command and subcommand."""
    from etfarm.wire import command

    parts = ["## etfarm", "", *_code(_help_of([])), ""]
    for name in command.SUMMARIES:
        if "." in name:
            continue
        text = _help_of([name])
        parts += [f"## etfarm {name}", "", *_code(text), ""]
        inner = [each.partition(".")[2] for each in command.SUMMARIES if each.startswith(f"{name}.")]
        listed = text.partition("Commands:\n")[2]
        inner += re.findall(r"^  ([a-z][\w-]*)\s{2,}", listed, re.MULTILINE)
        for subcommand in dict.fromkeys(inner):
            parts += [f"### etfarm {name} {subcommand}", "", *_code(_help_of([name, subcommand])), ""]
    return "\n".join(parts)


def _code(text: str) -> list[str]:
    return ["```text", text.strip(), "```"]


def _help_of(arguments: list[str]) -> str:
    from etfarm.wire import command

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        command.main([*arguments, "--help"])
    if not output.getvalue().strip():
        raise SystemExit(f"`etfarm {' '.join(arguments)} --help` prints nothing")
    return "\n".join(line.rstrip() for line in output.getvalue().replace(_HOME, "~").splitlines())


# --- settings of a server --------------------------------------------------------------------------------------------


def make_settings() -> str:
    """Make a table of the settings of `etfarm serve`, as a file has them."""
    from etfarm.server.arguments import parser
    from etfarm.server.operation.settings import settable
    from etfarm.wire.options import declaration_of

    parts = ["| setting | value | meaning |", "|---|---|---|"]
    for name, action in settable(parser()).items():
        if action.nargs == 0:
            value = "true, false"
        elif action.choices is not None:
            value = ", ".join(map(str, action.choices))
        else:
            value = f"list of {action.metavar}" if isinstance(action.default, list) else str(action.metavar)
        text = (action.help or "") % {"default": action.default, "prog": "etfarm serve"}
        meaning = text.replace("|", "\\|").replace(_HOME, "~")
        declared = declaration_of(action)
        if declared is not None and declared.is_reread:
            meaning += "; read again when it changes"
        parts.append(f"| `{name}` | {value} | {meaning} |")
    return "\n".join(parts) + "\n"


# --- thresholds of the verdict, and retention -------------------------------------------------------------------------


def make_thresholds() -> str:
    """Make a table of what makes a measurement INVALID, each number with its reason."""
    from etfarm.server.reports.latency.thresholds import Thresholds

    reasons = _field_docstrings(Thresholds)
    parts = ["| threshold | default | why |", "|---|---|---|"]
    for each in fields(Thresholds):
        parts.append(f"| `{each.name}` | {each.default:g} | {reasons[each.name]} |")
    return "\n".join(parts) + "\n"


def make_retention() -> str:
    """Make a table of what a server deletes, each with the limit up to which it keeps it."""
    from etfarm.server.retention.limits import Limits

    texts = _field_docstrings(Limits)
    rows = [f"| `{each.name}` | {each.default} | {texts[each.name]} |" for each in fields(Limits)]
    return "\n".join(("| NAME | default | what goes |", "|---|---|---|", *rows)) + "\n"


def _field_docstrings(kind: type) -> dict[str, str]:
    """Return the text under each field of a dataclass."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return texts


# --- metrics ---------------------------------------------------------------------------------------------------------

_METRICS: Final = {"Counter": "_total", "CounterMetricFamily": "_total", "Info": "_info"} | dict.fromkeys(
    ("Gauge", "GaugeMetricFamily", "Histogram", "HistogramMetricFamily"), ""
)
"""What Prometheus appends to the names of metrics, by the class that a server makes them with."""


def make_metrics() -> str:
    """Make a table of the server's metrics by the alphabet, each with its labels and its help text."""
    rows: dict[str, str] = {}
    for file in sorted((ROOT / "server" / "etfarm").rglob("*.py")):
        if "prometheus_client" not in (source := file.read_text()):
            continue
        for node in ast.walk(ast.parse(source)):
            suffix = _METRICS.get(ast.unparse(node.func).rpartition(".")[2]) if isinstance(node, ast.Call) else None
            if suffix is None or not node.args:
                continue
            literals = [*node.args[:3], *(each.value for each in node.keywords if each.arg == "labels")]
            try:
                name, text, *labels = (ast.literal_eval(each) for each in literals)
            except ValueError:
                raise SystemExit(f"{file}:{node.lineno}: name, help and labels of a metric must be literals") from None
            shown, text = ", ".join(f"`{label}`" for label in (labels[0] if labels else ())), text.replace("|", "\\|")
            rows[name] = f"| `{name}{suffix}` | {shown} | {text} |"
    return "\n".join(("| metric | labels | what it shows |", "|---|---|---|", *(rows[name] for name in sorted(rows)))) + "\n"


# --- the report's keys -----------------------------------------------------------------------------------------------


def make_report_keys() -> str:
    """Make a table of keys for each object of a report, in the order in which they are first used."""
    from etfarm.client.reports import Report
    from etfarm.v1 import common_pb2, report_pb2
    from etfarm.wire.report_keys import keys_of

    top = report_pb2.Report.DESCRIPTOR
    parts: list[str] = []
    waiting: list[tuple[Descriptor, type]] = [(top, Report)]
    done: set[str] = set()
    while waiting:
        kind, python_class = waiting.pop(0)
        if kind.full_name in done or kind.full_name == "google.protobuf.Timestamp":
            continue
        done.add(kind.full_name)
        parts += [f"### {kind.name}", ""]
        parts += [_as_json((inspect.getdoc(python_class) or "").partition("\n\n")[0]), ""]
        meanings = _meanings(python_class)
        parts += ["| key | value | meaning |", "|---|---|---|"]
        for key in keys_of(kind):
            if key.message is not None:
                waiting.append((key.message, _class_of_key(python_class, key.name)))
            meaning = meanings.get(key.name, "").replace("|", "\\|")
            parts.append(f"| `{key.name}` | {_type_of(key)} | {meaning} |")
        parts.append("")
    assert common_pb2.Error.DESCRIPTOR.full_name in done
    return "\n".join(parts)


def _meanings(python_class: type) -> dict[str, str]:
    """Return the text under each field of a report's dataclass, by the key of the field."""
    texts = _field_docstrings(python_class)
    keys = {each.name: each.metadata.get("key", each.name) for each in fields(python_class)}
    return {keys[name]: _as_json(text) for name, text in texts.items()}


def _class_of_key(python_class: type, key: str) -> type:
    """Return the dataclass of the objects that a key of another dataclass has: its own, or those of its list or map."""
    from etfarm.client.reports import JsonObject, Operator, Operators

    (attribute,) = (each.name for each in fields(python_class) if each.metadata.get("key", each.name) == key)
    waiting = [get_type_hints(python_class)[attribute]]
    while waiting:
        hint = waiting.pop()
        if hint is Operators:
            return Operator
        if isinstance(hint, type) and not get_args(hint) and issubclass(hint, JsonObject):
            return hint
        waiting += get_args(hint)
    raise TypeError(f"{python_class.__name__}.{attribute} has no dataclass")


def _as_json(text: str) -> str:
    """Return a docstring in one line, with null for None."""
    return re.sub(r"(?<!`)\bNone\b(?!`)", "null", " ".join(text.split()))


_UNITS: Final = {
    "ns": "ns", "ms": "ms", "s": "s", "us": "µs", "bytes": "bytes", "db": "dB", "hz": "Hz", "c": "°C", "mv": "mV", "percent": "%",
}  # fmt: skip
"""What the last part of a number's name says."""


def _type_of(key: Key) -> str:
    from etfarm.wire.report_keys import Shape

    single = _single_type(key)
    if key.shape is Shape.MAP:
        return f"object: {single} by name"
    if key.shape is Shape.LIST:
        plural = {"integer": "integers", "number": "numbers", "text": "texts"}.get(single, single)
        single = f"list of {plural}"
    parts = key.name.split("_")
    unit = _UNITS.get(parts[-1]) if len(parts) > 1 and key.message is None else None
    if parts[-2:] == ["per", "s"]:
        unit = "1/s"
    return f"{single}, {unit}" if unit else single


def _single_type(key: Key) -> str:
    from etfarm.wire.report_keys import Type
    from etfarm.wire.words import word_of

    field = key.field
    if key.message is not None:
        return f"[{key.message.name}](#{key.message.name.lower()})"
    if field.message_type is not None and field.message_type.name == "Timestamp":
        return "text, an instant in ISO 8601"
    if field.enum_type is not None:
        words = [word_of(field, value.number) for value in field.enum_type.values if value.number]
        return "text: " + ", ".join(f"`{word}`" for word in words)
    return {Type.TEXT: "text", Type.TRUTH: "true or false", Type.NUMBER: "number"}.get(key.type, "integer")


MAKERS: Final = {
    "commands": make_commands,
    "metrics": make_metrics,
    "reasons": make_reasons,
    "report-keys": make_report_keys,
    "retention": make_retention,
    "settings": make_settings,
    "thresholds": make_thresholds,
}


def main() -> int:
    """Write the generated blocks, or with --check compare them; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in _ENVIRONMENT.items()):
        # Help texts depend on the environment when modules are imported, so the script starts again in a fixed one.
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("ETFARM_", "XDG_"))}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**clean, **_ENVIRONMENT})
    stale = False
    used: set[str] = set()

    def fill(match: re.Match[str]) -> str:
        used.add(match[2])
        return f"{match[1]}\n{MAKERS[match[2]]().strip()}\n\n{match[3]}"

    _ERROR_TABLE.touch()
    pages = {page: _BLOCK.sub(fill, page.read_text()) for page in sorted(DOCS.glob("*.md"))}
    for page, after in {**pages, _ERROR_TABLE: make_error_table()}.items():
        before = page.read_text()
        if after == before:
            continue
        if arguments.check:
            stale = True
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), str(page), "generated", lineterm="", n=0)
            print("\n".join(list(lines)[:20]), file=sys.stderr)
        else:
            page.write_text(after)
            print(f"wrote {page.relative_to(ROOT)}")
    if unused := MAKERS.keys() - used:
        raise SystemExit(f"no page has a block for {', '.join(sorted(unused))}")
    if stale:
        print("Run .venv/bin/python docs/generate.py.", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
