"""A metric for `etfarm run --metric margin.py:margin`: how clearly a classifier decides, and how often as the label says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def margin(inputs: Mapping[str, Any], outputs: Mapping[str, Any], index: int, labels: Mapping[str, Any]) -> dict[str, float]:
    """Return the distance of the two largest scores, and 1.0 where the largest is the label's."""
    (scores,) = outputs.values()
    second, first = sorted(scores.ravel())[-2:]
    return {"margin": float(first - second), "correct": float(scores.argmax() == labels["label"])}
