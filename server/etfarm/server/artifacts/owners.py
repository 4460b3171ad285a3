"""Which farm may use a place for artifacts: of two that share one, each would delete what the other needs."""

from __future__ import annotations

from etfarm.server.state.identity import Identity
from etfarm.wire.escapes import in_a_line


def objection(owner: Identity | None, farm: Identity | None, claim: str, own: str) -> tuple[str, str] | None:
    """Return why a farm must not use a place, and what helps; None if it may.

    Args:
        owner: who has claimed the place; None if nobody has.
        farm: the farm; None for one that is still to be made.
        claim: what names the owner, as "the object KEY".
        own: what gives the farm a place of its own, as "name another prefix".
    """
    if owner is None:
        return None
    if farm is None or owner.farm_id != farm.farm_id:
        this = "a new one" if farm is None else farm.farm_id
        return (
            f"it has the artifacts of another farm, {in_a_line(owner.farm_id)}, and this is {this}",
            f"{own}. If the other farm is gone for good, delete {claim}",
        )
    if farm.since < owner.since:
        return (
            f"the farm was restored to another database at {owner.since:%Y-%m-%d %H:%M:%S} UTC, which has its artifacts now",
            "stop this server, or name that database in --database or --data. If the restored farm is gone for good, delete "
            f"{claim}",
        )
    return None
