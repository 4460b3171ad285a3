"""The pages: each module has its `ROUTES`, and the `TOPICS` that it shows live, if any."""

from __future__ import annotations

from etfarm.client.web.pages import (
    artifacts,
    compare,
    device_actions,
    devices,
    history,
    job,
    job_actions,
    jobs,
    live_events,
    queue,
    recipes,
    report,
    reservations,
    search,
    server,
    sign_in,
    submit,
)

PAGES = (
    sign_in, devices, queue, jobs, job, report, compare, history, recipes, artifacts, search, server, live_events,
    submit, job_actions, device_actions, reservations,
)  # fmt: skip
"""Modules of all pages; add a new one here."""
