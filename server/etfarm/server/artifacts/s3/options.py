"""Options that choose the bucket of the artifacts, of `etfarm serve` and of the commands that read or write artifacts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.s3.location import DEFAULT_REGION, BucketLocation
from etfarm.wire.options import Option, add_options

BLOBS: Final = ("artifacts in S3", "Off by default: then artifacts are files in --data. Needs etfarm[scale].")
"""Title and description of the options in the help."""
_KEEP: Final = "keep artifacts in this bucket, as s3://BUCKET/PREFIX; --data then has copies of those in use"


def blob_options(purpose: str = _KEEP) -> list[Option]:
    """Return the options that name a bucket and say how to reach it.

    Args:
        purpose: what the command does with the bucket, as help of the option that names it.
    """
    return [Option(flag="--blobs", metavar="URL", help=purpose, group=BLOBS), *bucket_options("--blobs", BLOBS)]


def add_blob_options(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add `blob_options` to a command."""
    add_options(parser, blob_options(purpose))


def bucket_options(option: str, group: tuple[str, str] | None = None) -> list[Option]:
    """Return the options that say how to reach the bucket of an option."""
    return [
        Option(
            flag=f"{option}-endpoint", metavar="URL", group=group,
            help="S3 server, as https://s3.example:8333 (default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS itself)",
        ),
        Option(
            flag=f"{option}-region", metavar="NAME", group=group,
            help=f"its region (default: AWS_REGION, AWS_DEFAULT_REGION, or {DEFAULT_REGION})",
        ),
        Option(
            flag=f"{option}-credentials", read=Path, metavar="FILE", group=group,
            help="file of ACCESS_KEY SECRET_KEY, which only its owner may read (default: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY; nothing else is asked for credentials)",
        ),
        Option(
            flag=f"{option}-ca", read=Path, metavar="FILE", group=group,
            help="PEM certificates that the S3 server's may be signed by, besides the system's",
        ),
    ]  # fmt: skip


def bucket_of(
    url: str | None,
    endpoint: str | None,
    region: str | None,
    credentials: Path | None,
    authorities: Path | None,
    option: str = "--blobs",
) -> BucketLocation | None:
    """Return the bucket that options and AWS_* variables name; None for files.

    Args:
        option: the option that names the bucket, for errors.

    Raises:
        BAD_BLOBS: an option is missing or not valid.
    """
    if not url:
        return None
    return BucketLocation.of(
        url, os.environ, endpoint=endpoint, region=region, credentials=credentials, authorities=authorities, option=option
    )


def location_of(arguments: argparse.Namespace, option: str = "blobs") -> BucketLocation | None:
    """Return the bucket that parsed options and AWS_* variables name; None for files.

    Args:
        option: the destination of the option that names the bucket.

    Raises:
        BAD_BLOBS: an option is missing or not valid.
    """
    url, endpoint, region, credentials, authorities = (
        getattr(arguments, option + part) for part in ("", "_endpoint", "_region", "_credentials", "_ca")
    )
    return bucket_of(url, endpoint, region, credentials, authorities, f"--{option.replace('_', '-')}")
