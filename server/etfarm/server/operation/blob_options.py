"""Options that choose the bucket of the artifacts, of `etfarm serve` and of the commands that read or write artifacts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.s3.location import DEFAULT_REGION, BucketLocation

_KEEP: Final = "keep artifacts in this bucket, as s3://BUCKET/PREFIX; --data then has copies of those in use"


def add_blob_options(parser: argparse.ArgumentParser, purpose: str = _KEEP) -> argparse._ArgumentGroup:
    """Add the options to a command.

    Args:
        purpose: what the command does with the bucket, as help of the option that names it.
    """
    group = parser.add_argument_group(
        "artifacts in S3", "Off by default: then artifacts are files in --data. Needs etfarm[scale]."
    )  # fmt: skip
    group.add_argument("--blobs", metavar="URL", help=purpose)
    add_bucket_options(group, "--blobs")
    return group


def add_bucket_options(group: argparse._ArgumentGroup, option: str) -> None:
    """Add the options that say how to reach the bucket of an option."""
    add = group.add_argument
    add(f"{option}-endpoint", metavar="URL",
        help="S3 server, as https://s3.example:8333 (default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS itself)")  # fmt: skip
    add(f"{option}-region", metavar="NAME", help=f"its region (default: AWS_REGION, AWS_DEFAULT_REGION, or {DEFAULT_REGION})")
    add(f"{option}-credentials", type=Path, metavar="FILE",
        help="file of ACCESS_KEY SECRET_KEY, which only its owner may read (default: AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY; nothing else is asked for credentials)")  # fmt: skip
    add(f"{option}-ca", type=Path, metavar="FILE",
        help="PEM certificates that the S3 server's may be signed by, besides the system's")  # fmt: skip


def location_of(arguments: argparse.Namespace, option: str = "blobs") -> BucketLocation | None:
    """Return the bucket that parsed options and AWS_* variables name; None for files.

    Args:
        option: the destination of the option that names the bucket.

    Raises:
        BadBlobs: an option is missing or not valid.
    """
    values = vars(arguments)
    if not values[option]:
        return None
    return BucketLocation.of(
        values[option], os.environ, endpoint=values[f"{option}_endpoint"], region=values[f"{option}_region"],
        credentials=values[f"{option}_credentials"], authorities=values[f"{option}_ca"],
        option=f"--{option.replace('_', '-')}",
    )  # fmt: skip
