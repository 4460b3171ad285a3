"""Cancel, retry and tag a job."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.formats import units
from etfarm.client.models import CellState, JobInfo
from etfarm.client.web.form_fields import Field, text_of
from etfarm.client.web.pages._actions import Action, perform
from etfarm.client.web.templating import templates_of
from etfarm.client.web.visitors import farm


async def cancel(request: Request) -> Response:
    """Ask, or cancel the job's unfinished cells."""
    job = await (await farm(request)).job(request.path_params["job_id"])
    live = sum(not cell.state.is_terminal for cell in job.info.cells)
    action = Action(
        title=f"Cancel {_name(job.info)}?",
        about=f"{units.count(live, 'cell')} of {len(job.info.cells)} not finished yet: they end, and what they measured is "
        "lost. Finished cells keep their reports.",
        button="Cancel the job", command=("etfarm", "jobs", "cancel", job.id), back=job_address(request, job.id),
        is_dangerous=True,
    )  # fmt: skip
    return await perform(request, action, lambda _: job.cancel())


async def retry(request: Request) -> Response:
    """Ask, or submit the job's failed cells as a new job."""
    job = await (await farm(request)).job(request.path_params["job_id"])
    failed = sum(cell.state is CellState.FAILED for cell in job.info.cells)
    action = Action(
        title=f"Run what failed of {_name(job.info)} again?",
        about=f"{units.count(failed, 'failed cell')} of {len(job.info.cells)}: a new job with the label retry_of runs them.",
        button="Run again", command=("etfarm", "jobs", "retry", job.id, "--detach"), back=job_address(request, job.id),
    )  # fmt: skip
    return await perform(request, action, lambda _: job.retry(), lambda new: job_address(request, new.id))


async def tag(request: Request) -> Response:
    """Ask for a tag, or give it to the job."""
    client = await farm(request)
    job = await client.job(request.path_params["job_id"])
    hint = "Letters, digits, dots, dashes and underscores. It stands for the job wherever its id does, for example `baseline`."
    known = f" It has {', '.join(job.info.tags)}." if job.info.tags else ""
    action = Action(
        title=f"Tag {_name(job.info)}",
        about=f"A tag moves from the job that had it before.{known}",
        button="Tag", command=("etfarm", "report", "tag", job.id), back=job_address(request, job.id),
        fields=(Field("tag", "Tag", hint=hint, is_required=True),),
    )  # fmt: skip
    return await perform(request, action, lambda fields: client.tag(job.id, text_of(fields, "tag")))


async def untag(request: Request) -> Response:
    """Ask, or remove a tag from the job."""
    client = await farm(request)
    job = await client.job(request.path_params["job_id"])
    name = request.path_params["tag"]
    action = Action(
        title=f"Remove the tag {name}?", about=f"{_name(job.info)} keeps its id, its other tags and its reports.",
        button="Remove", command=("etfarm", "report", "tag", job.id, name, "--remove"), back=job_address(request, job.id),
    )  # fmt: skip
    return await perform(request, action, lambda _: client.untag(name, job.id))


def job_address(request: Request, job_id: str) -> str:
    """Return the address of a job's page."""
    return templates_of(request).url_for("job", job_id=job_id)


def _name(job: JobInfo) -> str:
    return job.name or f"job {job.id[:12]}"


ROUTES = (
    Route("/jobs/{job_id}/cancel", cancel, name="cancel_job", methods=["GET", "POST"]),
    Route("/jobs/{job_id}/retry", retry, name="retry_job", methods=["GET", "POST"]),
    Route("/jobs/{job_id}/tag", tag, name="tag_job", methods=["GET", "POST"]),
    Route("/jobs/{job_id}/tags/{tag}/remove", untag, name="untag_job", methods=["GET", "POST"]),
)
