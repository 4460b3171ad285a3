"""The command `etfarm serve`, the server daemon."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import nullcontext
from functools import partial

from etfarm.server.arguments import config_of, parser
from etfarm.server.operation import logs, settings, stderr_lines, unit
from etfarm.server.operation.check import check
from etfarm.server.operation.death import Evidence
from etfarm.server.serving import Process, restart
from etfarm.server.state.folder import locked, require_restored
from etfarm.server.workers.pacing import shorten_thread_switches
from etfarm.wire.heap import share_one_heap
from etfarm.wire.private import close_umask
from etfarm.wire.systemd import without_options


def main(argv: list[str]) -> int:
    """Serve until SIGTERM, SIGINT or, with --exit-with-stdin, the end of stdin."""
    serve = parser()
    arguments, sources = settings.parse(serve, argv, os.environ)
    if arguments.check:
        logs.configure()  # to stderr: stdout has the answer
        return check(sources, partial(config_of, arguments), as_json=arguments.json)
    if arguments.print_unit:
        source = {each.name: each.source for each in sources}
        unit.refuse_secrets(sources)
        options, engines = vars(serve.parse_args(argv)) | {"data": arguments.data}, unit.engines_of(vars(arguments))
        is_chosen = source["data"] != settings.DEFAULT
        text = unit.unit_of_this(
            without_options(argv, serve), options, engines=engines, is_data_chosen=is_chosen, drain_s=arguments.drain_timeout,
            database=unit.database_options(sources, arguments.config),
        )  # fmt: skip
        print(text, end="")
        return 0
    config = config_of(arguments)
    config.check()
    with stderr_lines.as_json() if config.log_format == "json" else nullcontext(sys.stderr) as stream:
        logs.configure(config.log_format, stream)
        share_one_heap()
        shorten_thread_switches()
        close_umask()
        with locked(config.data):
            require_restored(config.data)
            former_address = asyncio.run(Process(config, sources, Evidence(config.data)).run())
    if former_address is not None:
        restart(former_address)
    return 0
