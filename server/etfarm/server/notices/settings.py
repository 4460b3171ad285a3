"""The settings of notices, from the server's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.server.notices.addresses import NO_HOSTS, AllowList, Resolve, parse
from etfarm.server.notices.errors import BadWebhook
from etfarm.wire.private import read_secret
from etfarm.wire.tls import read_certificates

_MIN_SECRET: Final = 16
_MAX_SECRET: Final = 1_000
_MAX_OPTIONS: Final = 20


@dataclass(frozen=True)
class NoticeSettings:
    """The settings of one server's notices."""

    webhooks: tuple[tuple[str, str], ...] = ()
    """Addresses that get every event, each with the secret that signs its notices."""
    allowed: AllowList = NO_HOSTS
    """Hosts that may have addresses that are not public."""
    authorities: bytes | None = None
    """PEM certificates of further authorities that receivers' certificates may be signed by."""
    offline_after_s: float = 900.0
    """Time for which a device must be offline before that is reported."""
    deadline_s: float = 10.0
    """Time limit of one try."""
    lookup: Resolve | None = None
    """Resolver of hosts' names; None for the system's."""

    @classmethod
    def of(
        cls,
        urls: Sequence[str],
        secret_files: Sequence[Path],
        allowed: Sequence[str],
        only_listed: bool,
        authorities: Path | None,
        offline_after_s: float,
    ) -> NoticeSettings:
        """Return the settings of the server's options.

        Raises:
            BadWebhook: an address, a secret or a listed host is not valid.
            BadTlsFile: the file of the authorities cannot be used.
        """
        if len(urls) > _MAX_OPTIONS:
            raise BadWebhook(f"--webhook can be given {_MAX_OPTIONS} times, got {len(urls)}.", "Add others: etfarm webhooks add.")
        if urls and len(secret_files) not in (1, len(urls)):
            raise BadWebhook(
                f"--webhook-secret must be given once, or once for each of the {len(urls)} --webhook, got {len(secret_files)}.",
                "Give a file whose first line is the secret that signs the notices.",
            )
        for url in urls:
            parse(url)
        secrets = [_secret(path) for path in secret_files]
        return cls(
            tuple(zip(urls, secrets if len(secrets) == len(urls) else secrets * len(urls), strict=True)),
            AllowList.of(allowed, only_listed=only_listed),
            read_certificates(authorities, "--webhook-ca") if authorities else None,
            offline_after_s,
        )


def _secret(path: Path) -> str:
    """Return the first line of a file.

    Raises:
        BadWebhook: it cannot be read, or is no secret.
    """
    remedy = f"Its first line must have {_MIN_SECRET} to {_MAX_SECRET} printable ASCII characters: openssl rand -hex 32."
    try:
        line, _, _ = read_secret(path, BadWebhook, _MAX_SECRET + 2).partition(b"\n")
        text = line.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadWebhook(f"The secret in {path} cannot be read: {getattr(error, 'strerror', 'not ASCII')}.", remedy) from None
    if not (_MIN_SECRET <= len(text) <= _MAX_SECRET and text.isprintable()):
        raise BadWebhook(f"{path} holds no secret.", remedy)
    return text
