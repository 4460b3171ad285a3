"""The pairing of the reports of two sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from etfarm.v1 import comparison_pb2
from etfarm.wire.report import Json


@dataclass(frozen=True)
class Pairing:
    """Pairs of corresponding reports in the base's order, and the remaining reports of each side in their own order."""

    pairs: tuple[tuple[Json, Json], ...]
    base_only: tuple[Json, ...]
    candidate_only: tuple[Json, ...]


def pair(base: Sequence[Json], candidate: Sequence[Json]) -> Pairing:
    """Return the pairs of corresponding reports.

    Reports correspond if they are of the same cell; else of the same model, recipe, method, threads and device; else of a device
    of the same kind. Names count, not digests, since a changed model or recipe is what is to be compared. Several reports with
    one key are paired in order. A cell that was never placed, and so has no device, corresponds to one of the same model, recipe
    and method. If each side has a single report, the two are always paired.
    """
    if len(base) == len(candidate) == 1:
        return Pairing(((base[0], candidate[0]),), (), ())
    left, right = dict(enumerate(base)), dict(enumerate(candidate))
    matches: dict[int, int] = {}
    for key in (_cell, _on_device, _on_kind):
        _match(left, right, matches, key)
    _match_unplaced(left, right, matches)
    return Pairing(
        tuple((base[place], candidate[matches[place]]) for place in sorted(matches)), tuple(left.values()), tuple(right.values())
    )


def differs(base: Json, candidate: Json) -> list[comparison_pb2.Trait.ValueType]:
    """Return those of model, recipe, method, threads and device (its kind, if both have one) in which two reports differ."""
    traits = [trait for trait, of in _TRAITS if of(base) != of(candidate)]
    if base["device"] and candidate["device"]:
        same = base["device"]["id"] == candidate["device"]["id"] or _kind(base) == _kind(candidate)
    else:
        same = base["device"] == candidate["device"]
    return traits if same else [*traits, comparison_pb2.TRAIT_DEVICE]


def _match(
    left: dict[int, Json], right: dict[int, Json], matches: dict[int, int], key: Callable[[Json], Hashable | None]
) -> None:
    """Move reports with equal keys other than None from `left` and `right` to `matches`."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, report in right.items():
        places[key(report)].append(place)
    for place, report in list(left.items()):
        wanted = key(report)
        if wanted is not None and places[wanted]:
            matches[place] = places[wanted].pop(0)
            del left[place], right[matches[place]]


def _match_unplaced(left: dict[int, Json], right: dict[int, Json], matches: dict[int, int]) -> None:
    for place, report in list(left.items()):
        for counterpart, candidate in right.items():
            alike = all(of(report) == of(candidate) for of in (_model, _recipe, _method))
            threads = _threads(report), _threads(candidate)
            if (
                alike
                and (report["device"] is None or candidate["device"] is None)
                and (threads[0] == threads[1] or None in threads)
            ):
                matches[place] = counterpart
                del left[place], right[counterpart]
                break


def _cell(report: Json) -> Hashable | None:
    return report["cell"]  # type: ignore[no-any-return]


def _on_device(report: Json) -> Hashable:
    return *_measured(report), report["device"]["id"] if report["device"] else None


def _on_kind(report: Json) -> Hashable:
    return *_measured(report), _kind(report)


def _measured(report: Json) -> tuple[Hashable, ...]:
    return _model(report), _recipe(report), _method(report), _threads(report)


def _model(report: Json) -> Hashable:
    return report["model"]["name"] if report["model"] else None


def _recipe(report: Json) -> Hashable:
    return report["recipe"]  # type: ignore[no-any-return]


def _method(report: Json) -> Hashable:
    return report["method"]  # type: ignore[no-any-return]


def _threads(report: Json) -> Hashable:
    return report["threads"]  # type: ignore[no-any-return]


def _kind(report: Json) -> Hashable:
    device = report["device"]
    return (device["arch"], device["soc"]) if device else None


_TRAITS: Final = (
    (comparison_pb2.TRAIT_MODEL, _model),
    (comparison_pb2.TRAIT_RECIPE, _recipe),
    (comparison_pb2.TRAIT_METHOD, _method),
    (comparison_pb2.TRAIT_THREADS, _threads),
)
