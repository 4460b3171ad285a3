"""`etfarm webhooks`: receivers of the farm's notices, and what was sent to them and to the addresses of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.errors import DONE, FAILED

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.models import WebhookDelivery

Answer = TypeVar("Answer")

_STYLES = {"DELIVERED": "green", "FAILED": "red", "PENDING": "yellow"}

WebhookId = Annotated[str, typer.Argument(metavar="ID", help="A webhook's id, as `etfarm webhooks list` shows it.")]


def main(argv: list[str]) -> int:
    """Run `etfarm webhooks`."""
    commands: dict[str, Command] = {
        "list": list_, "add": add, "remove": remove, "test": test, "deliveries": deliveries, "secret": secret,
    }  # fmt: skip
    about = (
        "Manage the receivers of notices over HTTP: jobs that ended, gates that failed, devices that are quarantined or offline."
    )
    return execute(commands, argv, "webhooks", about)


def list_(listing: Annotated[JsonListing, Key("webhooks")], connection: Connection) -> None:
    """List the farm's webhooks. Admins only."""
    from etfarm.client.cli.terminal import output

    webhooks = listing.record(connection.call(lambda farm: farm.webhooks.list()))
    if listing.is_on_stdout:
        return
    if not webhooks:
        print("The farm has no webhook: add one with `etfarm webhooks add URL`.")
        return
    rows = [
        (
            webhook.id,
            webhook.url,
            ", ".join(webhook.events),
            "an option of the server" if webhook.configured else webhook.created_by,
            str(webhook.waiting),
            str(webhook.dropped),
        )
        for webhook in webhooks
    ]
    heads = ("ID", "URL", "EVENTS", "BY", "WAITING", "DROPPED")
    output.show_table(heads, rows, right=("WAITING", "DROPPED"), shrink=("URL", "EVENTS"))


def add(
    connection: Connection,
    url: Annotated[str, typer.Argument(metavar="URL", help="https://HOST/PATH, or http://HOST:PORT/PATH.")],
    event: Annotated[
        list[str] | None,
        typer.Option(
            "--event", metavar="E", help="job.ended, gate.failed, device.quarantined or device.offline; repeatable. [all]"
        ),
    ] = None,
) -> None:
    """Add a webhook, and print the secret that signs its notices. Admins only."""
    webhook, key = connection.call(lambda farm: farm.webhooks.add(url, event or ()))
    tell(f"Webhook {webhook.id} gets {', '.join(webhook.events)}. Its secret, which is not shown again:", to_stderr=True)
    print(key)


def remove(connection: Connection, webhook_id: WebhookId) -> None:
    """Remove a webhook, with what waits to be sent to it. Admins only."""
    webhook = connection.call(lambda farm: farm.webhooks.remove(webhook_id))
    tell(f"Removed webhook {webhook.id} ({webhook.url}).")


def test(connection: Connection, webhook_id: WebhookId) -> int:
    """Send a test to a webhook, and exit with 1 if it does not arrive. Admins only."""
    delivery = connection.call(lambda farm: farm.webhooks.test(webhook_id))
    if delivery.state == "DELIVERED":
        tell(f"{delivery.url} answered with {delivery.status}.")
        return DONE
    again = f" It is tried again at {_instant(delivery)}." if delivery.next_at is not None else ""
    tell(f"etfarm: {delivery.error or 'The test has not been sent yet.'}{again}", to_stderr=True)
    return FAILED


def deliveries(
    listing: Annotated[JsonListing, Key("deliveries")],
    connection: Connection,
    job: Annotated[str, typer.Option("--job", metavar="JOB", help="Only notices of this job.")] = "",
    webhook: Annotated[str, typer.Option("--webhook", metavar="ID", help="Only notices to this webhook.")] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="How many to list at most.")] = 50,
) -> None:
    """List what was sent and what waits, newest first. Callers who are not admins see the notices of their projects' jobs."""
    from rich.text import Text

    from etfarm.client.cli.terminal import output

    async def fetch(farm: AsyncFarm) -> Sequence[WebhookDelivery]:
        job_id = (await farm.job(job)).id if job else ""
        return await farm.webhooks.deliveries(webhook_id=webhook, job_id=job_id, limit=limit)

    rows_of_log = listing.record(connection.call(fetch))
    if listing.is_on_stdout:
        return
    if not rows_of_log:
        print("No notice matches.")
        return
    rows = [
        (
            str(delivery.number),
            delivery.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
            delivery.event,
            delivery.job_id or "-",
            delivery.webhook_id or "the job's",
            delivery.url,
            Text(delivery.state.lower(), style=_STYLES.get(delivery.state, "")),
            str(delivery.attempts),
            delivery.error or (f"answered {delivery.status}" if delivery.status is not None else "-"),
        )
        for delivery in rows_of_log
    ]
    heads = ("#", "TIME", "EVENT", "JOB", "WEBHOOK", "URL", "STATE", "TRIES", "LAST")
    output.show_table(heads, rows, right=("#", "TRIES"), shrink=("LAST", "URL"))


def secret(connection: Connection) -> None:
    """Print the secret that signs the notices to the addresses of your project's jobs (`--notify`)."""
    known = connection.call(lambda farm: farm.webhooks.secret())
    tell(f"The secret of project {known.project}:", to_stderr=True)
    print(known.secret)


def _instant(delivery: WebhookDelivery) -> str:
    assert delivery.next_at is not None
    return delivery.next_at.astimezone().strftime("%H:%M:%S")
