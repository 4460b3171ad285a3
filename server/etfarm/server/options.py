"""Readers of the values of a server's options."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def not_negative(text: str) -> int:
    """Return a whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def absolute(text: str) -> str:
    """Return an absolute path."""
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError("must be an absolute path")
    return text


def seconds(text: str) -> float:
    """Return a time above 0 s and at most a week."""
    value = float(text)
    if not 0 < value <= 604_800:
        raise argparse.ArgumentTypeError("must be above 0 s and at most a week")
    return value


def seconds_or_none(text: str) -> float:
    """Return a time as `seconds`, or 0."""
    return 0.0 if float(text) == 0 else seconds(text)


def seconds_of_a_day(text: str) -> float:
    """Return a time of 0 s to a day."""
    value = float(text)
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError("must be 0 s to a day")
    return value


def web_address(text: str) -> str:
    """Return a URL of http or https."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError("must begin with http:// or https://")
    return text


def gib(count: int) -> int:
    """Return the bytes of a number of GiB."""
    return count << 30


def mib(count: int) -> int:
    """Return the bytes of a number of MiB."""
    return count << 20
