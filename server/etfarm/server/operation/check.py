"""`etfarm serve --check`: the effective configuration with each value's source, the jail's measures, and every problem."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from etfarm.server import preflight
from etfarm.server.artifacts.blobs import ARTIFACTS
from etfarm.server.artifacts.room import Room
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.errors import BlobsAway
from etfarm.server.config import LOCAL, Config
from etfarm.server.extras import ExtraMissing
from etfarm.server.operation.page_confinement import PageConfinement
from etfarm.server.operation.settings import Setting, plain
from etfarm.server.rpc.door.token_file import read_tokens
from etfarm.server.workers.cluster.nodes import NodeState, no_compile_node
from etfarm.server.workers.jail.measures import NETWORK, JailReport, Measure, jail_incomplete
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.private import FolderNotPrivate, find_openness
from etfarm.wire.tls import expiry_of

SCHEMA: Final = "etfarm.serve_check/1"
_DATABASE_S: Final = 5.0
"""Time within which a PostgreSQL server must answer."""
EXPIRES_SOON: Final = timedelta(days=14)
_WIDTH: Final = 22


@dataclass
class Result:
    """The result of a check."""

    settings: Sequence[Setting]
    facts: list[tuple[str, str]] = field(default_factory=list)
    """What follows from the settings and the machine."""
    measures: Sequence[Measure] = ()
    """Measures of the compile processes' jail."""
    page: Sequence[Measure] = ()
    """Measures of the web page's confinement."""
    warnings: list[str] = field(default_factory=list)
    problems: list[EtfarmError] = field(default_factory=list)
    """Why the server would not start."""

    def document(self) -> dict[str, Any]:
        """Return the result as JSON; docs/farm.md describes it."""
        return {
            "schema": SCHEMA,
            "ok": not self.problems,
            "settings": [{"name": each.name, "value": plain(each.value), "source": each.source} for each in self.settings],
            "facts": [{"name": name, "text": text} for name, text in self.facts],
            "jail": [{"name": each.name, "active": each.active, "detail": each.detail} for each in self.measures],
            "web_page": [{"name": each.name, "active": each.active, "detail": each.detail} for each in self.page],
            "warnings": self.warnings,
            "problems": [{"reason": each.reason, "message": each.message, "remedy": each.remedy} for each in self.problems],
        }

    def lines(self) -> list[str]:
        """Return the result for people."""
        lines = ["configuration"]
        lines += [f"  {each.name:<{_WIDTH}} {each.text:<28} {each.source}" for each in self.settings]
        lines += ["", *(f"  {name:<{_WIDTH}} {text}" for name, text in self.facts)] if self.facts else []
        for title, measures in (("confinement of the web page", self.page), ("jail of compile processes", self.measures)):
            lines += [title] if measures else []
            lines += [f"  {each.name:<{_WIDTH}} {'active ' if each.active else 'MISSING'}  {each.detail}" for each in measures]
        lines += [f"warning: {each}" for each in self.warnings]
        lines += [f"problem: {each}" for each in self.problems]
        return [line.rstrip() for line in [*lines, "the server would not start" if self.problems else "ok"]]


def check(settings: Sequence[Setting], create: Callable[[], Config], *, as_json: bool = False) -> int:
    """Print the check of a configuration. Return 0 if the server would start, else 1.

    Args:
        create: returns the configuration; its errors are problems.
    """
    result = Result(settings)
    try:
        _check(result, create())
    except EtfarmError as error:
        result.problems.append(error)
    print(json.dumps(result.document(), indent=2) if as_json else "\n".join(result.lines()))
    return 1 if result.problems else 0


def _check(result: Result, config: Config) -> None:
    config, is_readable = _check_database(result, config)
    result.facts += [
        ("listen", "this machine only" if config.listen.is_local else "other machines reach it"),
        ("data", str(config.data)),
        ("tokens", _tokens(config) if is_readable else "unknown, as the database cannot be used"),
        ("jail required", "yes" if config.is_jail_required else "no"),
    ]
    for require in (
        lambda: config.check(has_tokens=None if is_readable else True),
        lambda: config.tokens is not None and read_tokens(config.tokens),
    ):
        try:
            require()
        except EtfarmError as error:
            result.problems.append(error)
    _check_folder(result, config)
    _check_certificate(result, config)
    if _check_blobs(result, config) and is_readable:
        try:
            config.require_database()
        except EtfarmError as error:
            result.problems.append(error)
    if config.metrics is not None and not config.metrics.is_local:
        result.warnings.append(f"Everybody who reaches {config.metrics.text} can read the metrics, which name projects.")
    if config.web is not None:
        result.page = asyncio.run(PageConfinement(config, config.web_server or config.listen.text).measures())
    if config.compile_pool != LOCAL:
        _check_nodes(result, config)
        return
    report: JailReport = asyncio.run(preflight.find_jail(config))
    result.measures = report.measures
    if report.missing:
        missing = jail_incomplete(report.missing)
        if config.is_jail_required or any(measure.name == NETWORK for measure in report.missing):
            result.problems.append(missing)
        else:
            result.warnings.append(missing.message)


def _check_database(result: Result, config: Config) -> tuple[Config, bool]:
    """Check a PostgreSQL database. Return the configuration for the other checks, and whether these can read the database."""
    if config.database is None:
        return config, True
    result.facts.append(("database", str(config.database)))
    config = replace(config, database_wait_s=min(config.database_wait_s, _DATABASE_S))
    try:
        config.has_tokens  # noqa: B018 - connects
    except EtfarmError as error:
        result.problems.append(error)
        # With a limit, the store's limits do not depend on whether there are tokens.
        return replace(config, project_storage_bytes=config.project_storage_bytes or 0), False
    return config, True


def _check_nodes(result: Result, config: Config) -> None:
    """Check the cluster. A server starts without nodes, and uses those that join."""
    try:
        nodes = asyncio.run(preflight.find_nodes(config))
    except ExtraMissing:
        return  # a problem already
    except EtfarmError as error:
        result.problems.append(error)
        return
    result.facts += [("compile node", node.text) for node in nodes]
    if not any(node.state is NodeState.READY for node in nodes):
        result.warnings.append(no_compile_node(config.compile_pool, nodes).message)


def _check_folder(result: Result, config: Config) -> None:
    existing = next(path for path in (config.data, *config.data.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        result.problems.append(
            error_for(
                "DATA_FOLDER_UNUSABLE",
                f"The data folder cannot be used: {existing} cannot be written.",
                "Choose another --data.",
                path=existing,
            )
        )
        return
    for folder in (config.data, config.data / ARTIFACTS):
        try:
            if (openness := find_openness(folder)) is not None:
                result.warnings.append(f"{openness} The server closes it to them at its start.")
        except FolderNotPrivate as error:
            result.problems.append(error)
    space = Room(existing, config.keep_free_bytes, config.store_limits.work_bytes).measure()
    result.facts.append(("disk", f"{space.free_bytes >> 20} MiB free; new work needs {space.work_bytes >> 20} MiB"))
    if space.is_full:
        result.warnings.append("The disk is too full: the server would refuse new work.")


def _check_blobs(result: Result, config: Config) -> bool:
    """Check the place of the artifacts; return whether it can be read."""
    try:
        preflight.require_one_place(config)
    except EtfarmError as error:
        result.problems.append(error)
    if config.blobs is None:
        return True
    result.facts.append(("artifacts", config.blobs.place))
    if config.blobs_presign:
        result.facts.append(("agents read artifacts at", config.blobs_presign))
    try:
        asyncio.run(Bucket(config.blobs).check())
    except BlobsAway as error:
        result.warnings.append(f"{error} Until then uploads, downloads and compilations would wait.")
    except EtfarmError as error:
        result.problems.append(error)
    else:
        return True
    return False


def _check_certificate(result: Result, config: Config) -> None:
    try:
        identity = config.identity()
    except EtfarmError:
        return  # a problem already
    if identity is None or (expires := expiry_of(identity[0])) is None:
        return
    result.facts.append(("certificate expires", f"{expires:%Y-%m-%d %H:%M} UTC"))
    if expires < datetime.now(UTC):
        result.warnings.append("The certificate has expired: clients and agents refuse it.")
    elif expires - datetime.now(UTC) < EXPIRES_SOON:
        result.warnings.append("The certificate expires soon. The server reads a renewed one without a restart.")


def _tokens(config: Config) -> str:
    """Return where the server's tokens are stored."""
    places = [
        *([str(config.tokens)] if config.tokens else []),
        *(["the data folder" if config.database is None else "the database"] if config.has_tokens else []),
    ]
    return " and ".join(places) or "none"
