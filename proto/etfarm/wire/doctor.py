"""`etfarm doctor`: what this machine has of what etfarm uses, what is missing, what that costs, and the remedy. Stdlib only.

Each role offers its checks as an entry point of the group `etfarm.checks`, so that the command works with any extra.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Final

from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.names import CONFIG_VARIABLE, SERVER_VARIABLE, data_folder

GROUP: Final = "etfarm.checks"
TIME_LIMIT_S: Final = 15.0
"""Seconds that each check may take; all run at the same time."""
EXTRAS: Final = {"cli": "no command that uses a farm", "agent": "no device here", "server": "no server and no embedded farm here"}
"""The extras for the roles, with the cost of being without each."""
_STDOUT: Final = "-"
_THREAD_NAME: Final = "etfarm doctor: "
_FREE_BYTES: Final = 2 << 30
_REQUIREMENT: Final = re.compile(r"(?P<name>[\w.-]+)(?P<rest>[^;]*);.*extra == ['\"](?P<extra>\w+)['\"]")
_PIN: Final = re.compile(r"==\s*(?P<version>[\w.]+)")


class Status(StrEnum):
    """The status of a finding."""

    OK = "OK"
    WARNING = "WARNING"
    MISSING = "MISSING"
    OPTIONAL = "OPTIONAL"


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    MISSING means that etfarm cannot do its main job, WARNING that it does it worse, OPTIONAL that few need what is absent.
    """

    name: str
    status: Status
    detail: str
    cost: str = ""
    """What does not work, or is worse, without it."""
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def main(argv: list[str], checks: Mapping[str, Check] | None = None) -> int:
    """Check this machine; return 0 if nothing is MISSING, else 1.

    Args:
        argv: the arguments.
        checks: the checks by name; `collect_checks` by default.
    """
    parser = argparse.ArgumentParser(prog="etfarm doctor", description="Show what this machine has and lacks, with remedies.")
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const=_STDOUT, help="write the findings as JSON there, etfarm.doctor/1; - is stdout"
    )
    parser.add_argument("--config", metavar="FILE", help="also check this configuration file of a server (serve --config)")
    options = parser.parse_args(argv)
    if options.config:
        os.environ[CONFIG_VARIABLE] = options.config
    findings = run_checks(collect_checks() if checks is None else checks)
    is_usable = all(finding.status is not Status.MISSING for finding in findings)
    document = {"schema": "etfarm.doctor/1", "usable": is_usable, "findings": [asdict(finding) for finding in findings]}
    if options.json == _STDOUT:
        print(json.dumps(document, indent=2))
    else:
        if options.json:
            _write(parser, Path(options.json), f"{json.dumps(document, indent=2)}\n")
        print("\n".join(format_findings(findings)))
        print("The main job works: `etfarm bench`." if is_usable else "The main job does not work; see MISSING above.")
    sys.stdout.flush()
    if any(thread.name.startswith(_THREAD_NAME) for thread in threading.enumerate()):
        os._exit(0 if is_usable else 1)  # a check that exceeds its time limit must not delay the exit
    return 0 if is_usable else 1


def _write(parser: argparse.ArgumentParser, path: Path, text: str) -> None:
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        parser.error(f"--json cannot write {path}: {error.strerror}. Give another FILE, or - for stdout.")


def collect_checks() -> dict[str, Check]:
    """Return all checks by name: those of every installation, and those of the roles whose packages are installed."""
    checks: dict[str, Check] = {"python": check_python, "packages": check_packages, "data folder": check_data_folder}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            offered: Mapping[str, Check] = point.load()
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("etfarm"):
                raise
            continue  # `check_packages` reports the missing package
        checks |= offered
    return checks


def run_checks(checks: Mapping[str, Check], time_limit_s: float = TIME_LIMIT_S) -> list[Finding]:
    """Run checks at the same time; return their findings in order. A check that fails or hangs is a finding itself."""
    results: dict[str, list[Finding]] = {}

    def run(name: str, check: Check) -> None:
        try:
            results[name] = list(check())
        except Exception as error:  # noqa: BLE001 - the failure of one check must not hide the findings of the others
            results[name] = [Finding(name, Status.WARNING, f"The check failed: {error or type(error).__name__}")]

    threads = [threading.Thread(target=run, args=item, name=_THREAD_NAME + item[0], daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    late = [Finding("", Status.WARNING, f"No answer within {time_limit_s:g} s.")]
    deadline = time.monotonic() + time_limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [
        finding if finding.name else Finding(name, finding.status, finding.detail)
        for name in checks
        for finding in results.get(name, late)
    ]


def format_findings(findings: Sequence[Finding]) -> Iterable[str]:
    """Yield a line for each finding, with its cost and its remedy below."""
    names = max(len(finding.name) for finding in findings)
    for finding in findings:
        yield f"{finding.status:<8}  {finding.name:<{names}}  {_printable(finding.detail)}"
        for label, text in (("costs", finding.cost), ("remedy", finding.remedy)):
            if text:
                yield f"{'':<8}  {'':<{names}}  {label}: {_printable(text)}"


def _printable(text: str) -> str:
    """Return a text in one line without control characters: phones and servers supply parts of it."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))


def check_python() -> Iterable[Finding]:
    """Yield the versions of Python and etfarm."""
    yield Finding("etfarm", Status.OK, f"{version('etfarm')} on Python {platform.python_version()}, {platform.machine()}")


def find_package_problem(name: str, rest: str) -> str:
    """Return a clause about a package that is not installed, or of another version than the pinned one; empty if neither."""
    try:
        installed = version(name).partition("+")[0]
    except PackageNotFoundError:
        return f"{name} is not installed"
    pin = _PIN.search(rest)
    return f"{name} must be {pin['version']}, got {installed}" if pin is not None and pin["version"] != installed else ""


def check_packages(find_problem: Callable[[str, str], str] = find_package_problem) -> Iterable[Finding]:
    """Yield a finding for each role's extra: whether its packages are installed, with pinned versions."""
    incomplete = set[str]()
    for extra, cost in EXTRAS.items():
        problems = [problem for name, rest in _requirements(extra) if (problem := find_problem(name, rest))]
        if problems:
            incomplete.add(extra)
            remedy = f"pip install 'etfarm[{extra}]'"
            yield Finding(f"etfarm[{extra}]", Status.WARNING, f"{', '.join(problems)}.", f"{cost}.", remedy)
        else:
            yield Finding(f"etfarm[{extra}]", Status.OK, "installed")
    is_client = "cli" not in incomplete and (not incomplete or bool(os.environ.get(SERVER_VARIABLE)))
    is_device = "cli" in incomplete and "agent" not in incomplete
    is_server = "cli" in incomplete and "server" not in incomplete
    if not (is_client or is_device or is_server):
        remedy = f"pip install 'etfarm[all]', or set {SERVER_VARIABLE} to the farm's address."
        yield Finding("farm", Status.MISSING, "No farm can start here, and none is named.", "no model is measured.", remedy)


def _requirements(extra: str) -> Iterable[tuple[str, str]]:
    for text in requires("etfarm") or ():
        match = _REQUIREMENT.match(text)
        if match is not None and match["extra"] == extra:
            yield match["name"], match["rest"]


def check_data_folder() -> Iterable[Finding]:
    """Yield whether the user's data folder can be written, and has room."""
    folder = data_folder()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        yield Finding(
            "data folder", Status.MISSING, f"{existing} cannot be written.", "no embedded farm.", "Set ETFARM_DATA to another."
        )
        return
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / 1e9:.1f} GB free"
    if free < _FREE_BYTES:
        yield Finding(
            "data folder", Status.WARNING, text, "uploads and results may be refused.", "Free disk space, or set ETFARM_DATA."
        )
    else:
        yield Finding("data folder", Status.OK, text)
