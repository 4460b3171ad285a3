"""Where a bucket is, and what it takes to use it: the options of `etfarm serve`, and the standard AWS_* variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from etfarm.wire.errors import error_for
from etfarm.wire.private import read_secret
from etfarm.wire.tls import read_certificates

SCHEME: Final = "s3://"

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_MAX_PREFIX: Final = 200
_MAX_FILE_BYTES: Final = 64 << 10
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
DEFAULT_REGION: Final = "us-east-1"


@dataclass(frozen=True)
class Credentials:
    """Static credentials of S3."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


@dataclass(frozen=True)
class BucketLocation:
    """A folder of a bucket, and how to reach it."""

    bucket: str
    prefix: str
    """The folder, without slashes at its ends; empty for the whole bucket."""
    endpoint: str
    """URL of the server; empty for that of AWS in the region."""
    region: str
    credentials: Credentials = field(repr=False)
    credentials_file: Path | None = None
    """File of the credentials; None if they are from the environment."""
    authorities: bytes | None = field(default=None, repr=False)
    """PEM certificates that the server's may be signed by, besides the system's."""

    @property
    def url(self) -> str:
        """The folder as `s3://BUCKET/PREFIX`."""
        return f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def place(self) -> str:
        """The folder and its server, for people."""
        return f"{self.url} at {self.endpoint or f'AWS, {self.region}'}"

    @classmethod
    def of(
        cls,
        url: str,
        environment: Mapping[str, str],
        *,
        endpoint: str | None = None,
        region: str | None = None,
        credentials: Path | None = None,
        authorities: Path | None = None,
        option: str = "--blobs",
    ) -> BucketLocation:
        """Return the location that options and, where they are missing, AWS_* variables name. Nothing else is asked for it.

        Args:
            url: s3://BUCKET or s3://BUCKET/PREFIX.
            credentials: file of `ACCESS_KEY SECRET_KEY [SESSION_TOKEN]`, which only its owner may read.
            authorities: file of PEM certificates.
            option: the option that names the bucket, for errors.

        Raises:
            BAD_BLOBS: an option is missing or not valid.
            BadTlsFile: the certificates cannot be read.
        """
        bucket, _, prefix = url.removeprefix(SCHEME).rstrip("/").partition("/")
        if not url.startswith(SCHEME) or not _BUCKET.fullmatch(bucket):
            raise error_for("BAD_BLOBS", f"{option} must be s3://BUCKET or s3://BUCKET/PREFIX, got {url[:100]!r}.", "Correct it.")
        if prefix and (len(prefix) > _MAX_PREFIX or not _PREFIX.fullmatch(prefix)):
            raise error_for(
                "BAD_BLOBS",
                f"The prefix of {option} is not valid: {prefix[:100]!r}.",
                f"Use at most {_MAX_PREFIX} letters, digits, '.', '_' and '-', with single slashes between them.",
            )
        return cls(
            bucket,
            prefix,
            read_endpoint(
                endpoint or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or "",
                f"{option}-endpoint",
            ),
            region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or DEFAULT_REGION,
            _from_file(credentials, option) if credentials is not None else _from_environment(environment, option),
            credentials,
            read_certificates(authorities, f"{option}-ca") if authorities is not None else None,
        )


def read_endpoint(url: str, option: str = "--blobs-endpoint") -> str:
    """Return a server's URL without a slash at its end.

    Args:
        option: the option that names it, for errors.

    Raises:
        BAD_BLOBS: it is no http or https URL, or plain http to another machine.
    """
    if not url:
        return ""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username is not None:
        shown = url[:100] if "@" not in url else "a URL with a password"
        raise error_for("BAD_BLOBS", f"{option} is not a URL of an S3 server: {shown}.", "Give it as https://s3.example:8333.")
    if parts.scheme == "http" and host not in _LOOPBACK:
        authority = f"{option.removesuffix('-endpoint')}-ca" if option.endswith("-endpoint") else ""
        raise error_for(
            "BAD_BLOBS",
            f"{option} is plain http to another machine: {url[:100]}.",
            f"Use https; {authority} names the certificate of your own authority." if authority else "Use https.",
        )
    return url.rstrip("/")


def _from_file(path: Path, option: str) -> Credentials:
    try:
        text = read_secret(path, partial(error_for, "BAD_BLOBS"), _MAX_FILE_BYTES).decode()
    except OSError as error:
        raise error_for(
            "BAD_BLOBS", f"The file {path} cannot be read: {error.strerror}.", f"Check {option}-credentials."
        ) from None
    except UnicodeDecodeError:
        raise error_for("BAD_BLOBS", f"The file {path} is not UTF-8 text.", f"Check {option}-credentials.") from None
    lines = [words for line in text.splitlines() if (words := line.partition("#")[0].split())]
    if len(lines) != 1 or len(lines[0]) not in (2, 3):
        raise error_for(
            "BAD_BLOBS",
            f"The file {path} is not one line of ACCESS_KEY SECRET_KEY.",
            "A third word is the session token, if any.",
        )
    return Credentials(*lines[0])


def _from_environment(environment: Mapping[str, str], option: str) -> Credentials:
    access_key, secret_key = environment.get("AWS_ACCESS_KEY_ID", ""), environment.get("AWS_SECRET_ACCESS_KEY", "")
    if not access_key or not secret_key:
        raise error_for(
            "BAD_BLOBS",
            f"{option} has no credentials.",
            f"Give {option}-credentials FILE, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. "
            "Nothing else is asked for them.",
        )
    return Credentials(access_key, secret_key, environment.get("AWS_SESSION_TOKEN", ""))
