"""Libraries of extras, which the server imports only where an option needs them."""

from __future__ import annotations

from importlib.util import find_spec

from etfarm.wire.errors import UserError


class ExtraMissing(UserError):
    """An option that needs a library which is not installed here."""

    reason = "EXTRA_MISSING"

    def __init__(self, what: str, extra: str, missing: str) -> None:
        super().__init__(
            f"{what} needs etfarm[{extra}] ({missing} is not installed).",
            f"Run pip install 'etfarm[{extra}]'.",
            extra=extra,
            missing=missing,
        )


def require_extra(what: str, extra: str, library: str) -> None:
    """Refuse an option whose library is not installed.

    Args:
        what: the option, as the error's message begins.

    Raises:
        ExtraMissing: it is not.
    """
    if find_spec(library) is None:
        raise ExtraMissing(what, extra, library)
