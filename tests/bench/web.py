"""The farm's page in a real browser with 300 devices and 10,000 jobs: bytes, times, long tasks, delays of events, memory.

A simulated agent (the real protocol, no runner) serves the devices. Each change of a device has the time of its sending in a
label; the browser compares it with its own clock in the frame after the one that has shown it.

    python -m tests.bench.web [--devices 300] [--jobs 10000] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
from playwright.sync_api import Browser, BrowserContext, Page

from etfarm.v1 import agent_pb2
from tests.bench.stored_jobs import fill
from tests.support.simulated_agent import SimulatedAgent
from tests.support.simulated_web import TOKENS, SimulatedWebFarm
from tests.support.web import Visit, chromium, measure_memory

LIMITS: Final = {
    "first_page_bytes": 100_000, "first_page_ms": 200.0, "longest_task_ms": 50.0, "event_p99_ms": 150.0,
    "streams_cpu_percent": 10.0, "heap_growth_bytes": 2_000_000, "stale_rows": 0.0,
}  # fmt: skip
"""The results are at most these."""
LOADS: Final = 9
EVENTS, EVENTS_PER_S = 400, 20.0
FLOOD, FLOOD_PER_S = 10_000, 400.0
STREAMS, STREAMS_OF_VISITOR, STREAMS_S, STREAM_EVENTS_PER_S = 100, 20, 20.0, 5.0
PAGES: Final = ("/devices", "/jobs", "/queue")

_OBSERVE: Final = """() => {
  window.longest = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
  }).observe({type: "longtask", buffered: true});
}"""
_STAMPS: Final = """() => {
  window.delays = [];
  const seen = new Set();
  new MutationObserver((changes) => {
    const fresh = [];
    for (const change of changes) for (const node of change.addedNodes) {
      const stamp = /stamp=(\\d+)/.exec(node.textContent)?.[1];
      if (stamp && !seen.has(stamp)) { seen.add(stamp); fresh.push(Number(stamp)); }
    }
    if (fresh.length) requestAnimationFrame(() => setTimeout(() => fresh.forEach((at) => delays.push(Date.now() - at))));
  }).observe(document.querySelector("main"), {childList: true, subtree: true});
}"""
"""Records delays. What runs after a frame's callbacks runs once the frame is painted."""


class Bench:
    """The farm, its page and a browser."""

    def __init__(self, web: SimulatedWebFarm, browser: Browser, agent: SimulatedAgent) -> None:
        self._web = web
        self._browser = browser
        self._agent = agent
        context = self._context()
        page = context.new_page()
        page.goto(f"{web.url}/sign-in")
        page.fill("#token", TOKENS["user"])
        page.click("main button")
        page.locator("tbody tr").first.wait_for()
        self._state = context.storage_state()
        context.close()

    def _context(self, **options: Any) -> BrowserContext:
        return self._browser.new_context(viewport={"width": 1280, "height": 900}, **options)

    @contextmanager
    def _page(self) -> Iterator[Page]:
        context = self._context(storage_state=self._state)
        try:
            yield context.new_page()
        finally:
            context.close()

    def first_page(self) -> dict[str, float]:
        """Load the first page with an empty cache, several times, in turns with a page of one word: the floor of this machine."""
        loads, floors = [], []
        for _ in range(LOADS):
            floors.append(self._load("/healthz"))
            loads.append(self._load("/devices"))
        return {
            "first_page_bytes": max(load[0] for load in loads),
            "first_page_ms": statistics.median(load[1] for load in loads),
            "first_page_cpu_ms": statistics.median(load[2] for load in loads),
            "floor_ms": statistics.median(load[1] for load in floors),
            "floor_cpu_ms": statistics.median(load[2] for load in floors),
        }

    def _load(self, path: str) -> tuple[int, float, float]:
        """Return the transferred bytes, the time until a page is loaded, and the CPU time of its main thread, in ms."""
        with self._page() as page:
            tools = page.context.new_cdp_session(page)
            tools.send("Network.enable")
            tools.send("Performance.enable", {"timeDomain": "threadTicks"})
            loaded: list[float] = []
            tools.on("Network.loadingFinished", lambda event: loaded.append(event["encodedDataLength"]))
            page.goto(f"{self._web.url}{path}", wait_until="load")
            time_ms = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
            metrics = {each["name"]: each["value"] for each in tools.send("Performance.getMetrics")["metrics"]}
            return int(sum(loaded)), time_ms, 1e3 * metrics["TaskDuration"]

    def long_tasks(self) -> dict[str, float]:
        """Open the large lists, move through them, and watch them change."""
        longest = {}
        for path in PAGES:
            with self._page() as page:
                page.add_init_script(f"({_OBSERVE})()")
                page.goto(f"{self._web.url}{path}", wait_until="load")
                for _ in range(20):
                    page.keyboard.press("j")
                page.mouse.wheel(0, 20_000)
                self._change(100, 50.0)
                longest[path] = page.evaluate("longest")
        return {"longest_task_ms": max(longest.values()), **{f"longest_task_ms {path}": value for path, value in longest.items()}}

    def delays(self) -> dict[str, float]:
        """Measure the time from the agent's message to the painted frame."""
        with self._live_page() as page:
            page.evaluate(_STAMPS)
            self._change(EVENTS, EVENTS_PER_S)
            delays = sorted(self._until_all_are_shown(page))
        at = {50: delays[len(delays) // 2], 99: delays[int(len(delays) * 0.99)], 100: delays[-1]}
        return {"events": len(delays), **{f"event_p{part}_ms": float(value) for part, value in at.items()}}

    def heap(self) -> dict[str, float]:
        """Measure the page's memory before and after many events, and count the rows that do not show their last one."""
        with self._live_page() as page:
            self._change(200, FLOOD_PER_S)
            before = measure_memory(page)
            self._change(FLOOD, FLOOD_PER_S)
            page.wait_for_timeout(2_000)
            after = measure_memory(page)
            pairs: list[list[str]] = page.locator("tbody tr").evaluate_all(
                "(rows) => rows.map((row) => [row.dataset.key, row.textContent])"
            )
        shown, devices = dict(pairs), self._agent.devices.values()
        stale = sum(f"stamp={device.labels['stamp']}" not in shown.get(device.id, "") for device in devices)
        return {
            "heap_bytes": after.heap_bytes, "heap_growth_bytes": after.heap_bytes - before.heap_bytes,
            "nodes_growth": after.nodes - before.nodes, "stale_rows": stale,
        }  # fmt: skip

    def streams(self) -> dict[str, float]:
        """Measure the page's process while many streams are open and devices change."""
        process = psutil.Process(self._web.page.pid)

        async def run() -> dict[str, float]:
            visits = [Visit(self._web.url) for _ in range(STREAMS // STREAMS_OF_VISITOR)]
            for visit in visits:
                await asyncio.to_thread(visit.sign_in, TOKENS["user"])
            received = [0] * STREAMS
            tasks = [asyncio.create_task(_read(visits[i // STREAMS_OF_VISITOR], received, i)) for i in range(STREAMS)]
            await asyncio.sleep(3.0)
            began_bytes, began_s, began = sum(received), time.monotonic(), process.cpu_times()
            await self._send_changes(int(STREAMS_S * STREAM_EVENTS_PER_S), STREAM_EVENTS_PER_S)
            ended = process.cpu_times()
            cpu_s = ended.user + ended.system - began.user - began.system
            seconds = time.monotonic() - began_s
            open_streams = sum(not task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            return {
                "streams": open_streams, "streams_cpu_percent": 100 * cpu_s / seconds,
                "stream_bytes_per_s": (sum(received) - began_bytes) / STREAMS / seconds,
            }  # fmt: skip

        return self._web.agents.run(run())

    @contextmanager
    def _live_page(self) -> Iterator[Page]:
        with self._page() as page:
            page.goto(f"{self._web.url}/devices")
            page.locator("#connection[data-state=live]").wait_for()
            yield page

    def _change(self, count: int, per_s: float) -> None:
        self._web.agents.run(self._send_changes(count, per_s))

    async def _send_changes(self, count: int, per_s: float) -> None:
        """Change devices one after the other, each with the time in its label."""
        loop, devices = asyncio.get_running_loop(), list(self._agent.devices.values())
        began_s = loop.time()
        for number in range(count):
            await asyncio.sleep(max(0.0, began_s + number / per_s - loop.time()))
            device = devices[number % len(devices)]
            device.labels["stamp"] = str(time.time_ns() // 1_000_000)
            self._agent._send(agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=device)))

    def _until_all_are_shown(self, page: Page) -> list[float]:
        """Return the delays; changes in the same millisecond are one."""
        page.wait_for_timeout(1_000)
        delays: list[float] = page.evaluate("delays")
        return delays


async def _read(visit: Visit, received: list[int], index: int) -> None:
    """Read a stream of events, and count its bytes."""
    host, _, port = visit.url.rpartition("/")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    cookies = "; ".join(f"{name}={value}" for name, value in visit.cookies.items())
    writer.write(f"GET /live?topic=devices HTTP/1.1\r\nHost: {host}:{port}\r\nCookie: {cookies}\r\n\r\n".encode())
    try:
        while data := await reader.read(1 << 16):
            received[index] += len(data)
    finally:
        writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(fill(Path(folder) / "server" / "farm.sqlite", options.jobs, devices=1))  # a former one; the others connect
        with SimulatedWebFarm(Path(folder)) as web, chromium() as browser:
            names = tuple(f"board-{number:03}" for number in range(options.devices))
            bench = Bench(web, browser, web.agents.add("rack", devices=names))
            results: dict[str, float] = {"devices": options.devices, "jobs": options.jobs}
            for measure in (bench.first_page, bench.long_tasks, bench.delays, bench.streams, bench.heap):
                measured = measure()
                results |= measured
                for name, value in measured.items():
                    limit = LIMITS.get(name)
                    print(f"{name:24} {value:12.1f}{'' if limit is None else f'   limit {limit:g}'}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"results": results, "limits": LIMITS}, indent=2) + "\n")
    return 1 if any(results[name] > limit for name, limit in LIMITS.items()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
