"""The ownership rule: only the owner of a resource and admins may change it."""

from __future__ import annotations

from etfarm.wire.errors import Kind, UserError


class NotYours(UserError):
    """A resource that belongs to another user."""

    reason = "NOT_YOURS"
    kind = Kind.PERMISSION_DENIED


def require_owner(
    owner: str, what: str, caller: str, *, is_admin: bool, remedy: str = "Ask the owner or an admin.", **metadata: str
) -> None:
    """Require that the caller is the owner or an admin.

    Args:
        what: names the resource, as the beginning of a sentence.
        metadata: further metadata of the error, besides the owner.

    Raises:
        NotYours: the caller is neither the owner nor an admin.
    """
    if caller != owner and not is_admin:
        raise NotYours(f"{what} belongs to {owner}.", remedy, owner=owner, **metadata)
