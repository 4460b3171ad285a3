"""The rule who may change what a user made: that user, and admins."""

from __future__ import annotations

from etfarm.wire.errors import Kind, UserError


class NotYours(UserError):
    """What the caller wants to change belongs to another user."""

    reason = "NOT_YOURS"
    kind = Kind.PERMISSION_DENIED


def require_owner(
    owner: str, what: str, caller: str, *, is_admin: bool, remedy: str = "Ask them or an admin.", **metadata: str
) -> None:
    """Require that the caller is the owner or an admin.

    Args:
        what: names what is owned, as the beginning of a sentence.
        metadata: of the error, beside the owner.

    Raises:
        NotYours: the caller is neither.
    """
    if caller != owner and not is_admin:
        raise NotYours(f"{what} belongs to {owner}.", remedy, owner=owner, **metadata)
