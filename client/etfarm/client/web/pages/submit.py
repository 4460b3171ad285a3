"""Submit a model: the browser sends its file first, then the form says how to measure it."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import EtfarmError
from etfarm.client.fleet.recipe_devices import describe_missing_device, locate
from etfarm.client.models import Device, DeviceState, RecipeInfo
from etfarm.client.submit.bench_options import BenchOptions
from etfarm.client.submit.recipes import DEFAULT_RECIPE
from etfarm.client.web.form_fields import Field, command_line, integer_of, is_thread_count, lines_of, number_of, pairs_of, text_of
from etfarm.client.web.forms import Fields, form
from etfarm.client.web.pages.job_actions import job_address
from etfarm.client.web.security import UPLOAD_TYPE
from etfarm.client.web.templating import STATUSES, render
from etfarm.client.web.uploads import Upload, Uploads
from etfarm.client.web.visitors import farm, visitor_of
from etfarm.wire import recipes as wire_recipes
from etfarm.wire.errors import Fault, Kind, error_for, error_of
from etfarm.wire.measurement import FIELDS, MeasurementOptions
from etfarm.wire.options import Option, built

RECIPES_S: Final = 2.0
"""Seconds that the server may take to tell its recipes."""
MAX_THREADS: Final = 16
"""Number of thread counts in one job."""


@dataclass(frozen=True)
class Choice:
    """A recipe or a device that can be chosen."""

    field: Field
    about: str
    missing: str = ""
    """Why it cannot be used now; empty if it can."""


async def submit(request: Request) -> Response:
    """Show the form, or submit the job that it describes and go to its page."""
    if request.method != "POST":
        chosen = request.query_params.getlist("device")
        fields = Fields([*(("device", f"id={each}") for each in chosen), ("recipe", DEFAULT_RECIPE)])
        return await _show(request, fields, None)
    fields = form(request)
    try:
        _require_submitter(request)
        upload = _uploads(request).get(visitor_of(request).cookie, text_of(fields, "upload"))
    except EtfarmError as error:
        return await _show(request, fields, None, error)
    try:
        options = read_options(fields)
        job = await (await farm(request)).submit_bench(upload.model, options)
    except EtfarmError as error:
        return await _show(request, fields, upload, error)
    _uploads(request).remove(upload)
    return RedirectResponse(job_address(request, job.id), status_code=303)


async def upload(request: Request) -> Response:
    """Take a file as it is, and return its id for the form."""
    visitor = visitor_of(request)
    try:
        _require_submitter(request)
        if request.headers.get("content-type", "").partition(";")[0] != UPLOAD_TYPE:
            raise error_for(
                "MODEL_FILE_REFUSED", f"The request's type must be {UPLOAD_TYPE}.", "Send the file itself as the body."
            )
        name = request.query_params.get("name", "")
        client = await farm(request)
        stored = await _uploads(request).store(visitor.cookie, visitor.account.digest, name, _chunks(request), client.inspect)
    except EtfarmError as error:
        described = {"reason": error.reason, "message": error.message, "remedy": error.remedy}
        return JSONResponse(described, status_code=STATUSES[error.kind])
    return JSONResponse({"id": stored.id, "name": stored.name, "size_bytes": stored.size_bytes})


def read_options(fields: Fields) -> BenchOptions:
    """Return the options that a form describes.

    Raises:
        EtfarmError: a value is not allowed, as far as the page knows without asking the farm.
    """
    # A recipe's text that ends with .toml would be read as a file of this machine.
    recipes = [wire_recipes.parse(text) for text in (*_chosen(fields, "recipe"), *lines_of(text_of(fields, "more_recipes")))]
    if not recipes:
        raise error_for(
            "BAD_OPTION", "No recipe is chosen.", "Choose at least one; a .pte, which is compiled, ignores it.", option="recipes"
        )
    minutes = number_of(fields, "deadline", "Needed within")
    return BenchOptions(
        recipes,
        [*_chosen(fields, "device"), *lines_of(text_of(fields, "selectors"))] or [""],
        all_devices="all_devices" in fields,
        threads=_threads_of(text_of(fields, "threads")),
        name=text_of(fields, "name"),
        labels=pairs_of(text_of(fields, "labels"), "Labels"),
        deadline=None if minutes is None else timedelta(minutes=minutes),
        reservation=text_of(fields, "reservation"),
        **vars(_measurement(fields)),
    )


def _measurement(fields: Fields) -> MeasurementOptions:
    """Return the options of the measurement that a form describes, as the command line would."""
    values = {each.name: _value_of(name, each, fields) if each.label else each.default for name, each in FIELDS.items()}
    return built(MeasurementOptions, Namespace(**values))


def _value_of(name: str, option: Option, fields: Fields) -> Any:
    if option.default is False:
        return name in fields
    if option.range is None:
        return text_of(fields, name)
    return (integer_of if option.read is int else number_of)(fields, name, option.label)


def _require_submitter(request: Request) -> None:
    """Check the role before a file is stored or looked for; what a visitor may submit, the farm decides.

    Raises:
        UserError: the farm would refuse every submission of the visitor.
    """
    visitor = visitor_of(request)
    if not visitor.may_change:
        raise error_of(
            Fault.USER, "PERMISSION_DENIED", f"The role {visitor.role.lower()} submits nothing.",
            "Ask an admin of the farm for a token of a user.", kind=Kind.PERMISSION_DENIED,
        )  # fmt: skip


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        if chunk:
            yield chunk


def _uploads(request: Request) -> Uploads:
    uploads = request.app.state.uploads
    assert isinstance(uploads, Uploads)
    return uploads


def _chosen(fields: Fields, name: str) -> list[str]:
    return [str(value) for value in fields.getlist(name) if value]


def _threads_of(text: str) -> list[int]:
    counts = [part.strip() for part in text.split(",") if part.strip()]
    if len(counts) > MAX_THREADS or not all(map(is_thread_count, counts)):
        raise error_for(
            "BAD_OPTION", f"Threads must be whole numbers, got {text[:40]!r}.", "Write for example 1,2,4.", option="threads"
        )
    return [int(part) for part in counts]


async def _recipes(client: AsyncFarm) -> list[RecipeInfo]:
    """Return the farm's recipes; those of etfarm while the server still loads its compiler, which knows what it lacks."""
    try:
        async with asyncio.timeout(RECIPES_S):
            return await client.recipes()
    except TimeoutError:
        known = wire_recipes.RECIPES.values()
        return [
            RecipeInfo(
                name=each.name, summary=each.summary, backend=each.backend, quantization=each.quantization.value, available=True
            )
            for each in known
        ]


async def _show(request: Request, fields: Fields, upload: Upload | None, error: EtfarmError | None = None) -> Response:
    client = await farm(request)
    known, devices, reservations = await asyncio.gather(_recipes(client), client.devices(), client.reservations())
    recipes = _recipe_choices(known, devices, _chosen(fields, "recipe"))
    boards = [_device_choice(device, _chosen(fields, "device")) for device in devices]
    options = _option_fields(fields)
    file_name = upload.name if upload is not None else "MODEL.pt2"
    command = command_line(("etfarm", "bench", file_name), [*(choice.field for choice in (*recipes, *boards)), *options.values()])
    return render(
        request, "submit.html", title="Submit", status=STATUSES[error.kind] if error is not None else 200, error=error,
        command=f"{command} --detach", upload=upload, recipes=recipes, boards=boards,
        options=options, reservations=reservations, reservation=text_of(fields, "reservation"),
    )  # fmt: skip


def _recipe_choices(known: Sequence[RecipeInfo], devices: Sequence[Device], chosen: Sequence[str]) -> list[Choice]:
    """Return the recipes, each with what it lacks: the server's tools, or a device that runs its programs."""
    rows = [locate(recipe, devices) for recipe in known]
    has_devices = any(row.devices for row in rows)  # otherwise, each one would lack the same
    return [
        Choice(
            Field("recipe", row.name, value=row.name, flag="--recipe", kind="checkbox", is_checked=row.name in chosen),
            row.summary,
            (row.missing or "not available") if not row.available else describe_missing_device(row) if has_devices else "",
        )
        for row in rows
    ]


def _device_choice(device: Device, chosen: Sequence[str]) -> Choice:
    value = f"id={device.id}"
    field = Field(
        "device", device.name or device.id[:12], value=value, flag="--device", kind="checkbox", is_checked=value in chosen
    )
    about = f"{device.soc or device.arch}{', emulated' if device.emulated else ''}, {device.state.value.lower()}"
    return Choice(field, about, "offline" if device.state is DeviceState.OFFLINE else "")


def _option_fields(fields: Fields) -> Mapping[str, Field]:
    """Return the fields beside recipes and devices, with what the visitor has sent."""
    declared = (
        Field("more_recipes", "Recipes with arguments", flag="--recipe", kind="lines",
              hint="One in each line, as `xnnpack_fp32+portable` or `NAME:key=value`."),
        Field("selectors", "Selectors", flag="--device", kind="lines",
              hint="One in each line: a cell on one device that matches, as `arch=aarch64,memory>=2GiB`."),
        Field("all_devices", "On each device that matches", flag="--all-devices", kind="checkbox"),
        *(_field_of(name, option) for name, option in FIELDS.items() if option.label),
        Field("threads", "Threads", flag="--threads", hint="As `1,2,4`: a cell for each."),
        Field("deadline", "Needed within", flag="--deadline", unit="m", kind="number", minimum=1,
              hint="Minutes; what has not started by then fails."),
        Field("name", "Name", flag="--name"),
        Field("labels", "Labels", flag="--label", kind="lines", hint="One `key=value` in each line."),
    )  # fmt: skip
    return {field.name: _filled(field, fields) for field in declared}


def _field_of(name: str, option: Option) -> Field:
    """Return the field of an option of the measurement."""
    least, most = option.range or (None, None)
    return Field(
        name, option.label, flag=option.flag, placeholder=option.without, hint=str(option.help), minimum=least, maximum=most,
        kind="checkbox" if option.default is False else "text" if option.range is None else "number",
    )  # fmt: skip


def _filled(field: Field, fields: Fields) -> Field:
    if field.kind == "checkbox":
        return replace(field, is_checked=field.name in fields)
    return replace(field, value=text_of(fields, field.name))


ROUTES = (
    Route("/submit", submit, name="submit", methods=["GET", "POST"]),
    Route("/uploads", upload, name="upload", methods=["POST"]),
)
