"""The options that name a bucket for artifacts, of `etfarm serve`, `etfarm backup` and `etfarm restore`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from etfarm.server.artifacts.s3.location import DEFAULT_REGION, BucketLocation


def add_blob_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options to a command."""
    group = parser.add_argument_group(
        "artifacts in S3", "Off by default: then artifacts are files in --data. Needs etfarm[scale]."
    )  # fmt: skip
    add = group.add_argument
    add("--blobs", metavar="URL",
        help="keep artifacts in this bucket, as s3://BUCKET/PREFIX; --data then has copies of those in use")  # fmt: skip
    add("--blobs-endpoint", metavar="URL",
        help="S3 server, as https://s3.example:8333 (default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS itself)")  # fmt: skip
    add("--blobs-region", metavar="NAME", help=f"its region (default: AWS_REGION, AWS_DEFAULT_REGION, or {DEFAULT_REGION})")
    add("--blobs-credentials", type=Path, metavar="FILE",
        help="file of ACCESS_KEY SECRET_KEY, which only its owner may read (default: AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY; nothing else is asked for credentials)")  # fmt: skip
    add("--blobs-ca", type=Path, metavar="FILE",
        help="PEM certificates that the S3 server's may be signed by, besides the system's")  # fmt: skip
    return group


def location_of(arguments: argparse.Namespace) -> BucketLocation | None:
    """Return the bucket that parsed options and AWS_* variables name; None for files.

    Raises:
        BadBlobs: an option is missing or not valid.
    """
    if not arguments.blobs:
        return None
    return BucketLocation.of(
        arguments.blobs, os.environ, endpoint=arguments.blobs_endpoint, region=arguments.blobs_region,
        credentials=arguments.blobs_credentials, authorities=arguments.blobs_ca,
    )  # fmt: skip
