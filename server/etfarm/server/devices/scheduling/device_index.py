"""An index of devices by the values that selectors compare, so that a selector is not evaluated for every device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from etfarm.server.devices.scheduling.pieces import Record
from etfarm.v1.device_pb2 import Device
from etfarm.wire.selectors import Selector, Term

_KEYS: Final = ("id", "name", "arch", "feature", "backend", "emulated")
"""Keys whose `=` compares whole values; labels are further ones."""

_MAX_SELECTORS: Final = 4096
"""Maximum number of selectors whose devices are remembered."""


class DeviceIndex:
    """The ids of devices by key and value."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, object], set[str]] = {}
        self._values: dict[str, frozenset[tuple[str, object]]] = {}
        """The indexed values of each device."""
        self._matching: dict[Selector, list[str]] = {}
        """The ids of the devices that selectors match, until a device changes."""

    def put(self, device: Device) -> None:
        """Add a device, or replace its former values."""
        self._matching.clear()
        former, values = self._values.get(device.id, frozenset()), frozenset(_values_of(device))
        if values == former:
            return
        self._values[device.id] = values
        for value in former - values:
            self._drop(value, device.id)
        for value in values - former:
            self._ids.setdefault(value, set()).add(device.id)

    def remove(self, device_id: str) -> None:
        """Remove a device."""
        self._matching.clear()
        for value in self._values.pop(device_id, frozenset()):
            self._drop(value, device_id)

    def matching(self, selector: Selector, devices: Mapping[str, Record]) -> list[Device]:
        """Return the devices that a selector matches.

        Args:
            selector: the selector.
            devices: all indexed devices.
        """
        if (known := self._matching.get(selector)) is None:
            if len(self._matching) >= _MAX_SELECTORS:
                self._matching.clear()
            known = self._matching[selector] = self._select(selector, devices)
        return [devices[each].device for each in known]

    def _select(self, selector: Selector, devices: Mapping[str, Record]) -> list[str]:
        having: list[Collection[str]] = []
        rest: list[Term] = []
        for term in selector.terms:
            if term.operator == "=" and (term.key in _KEYS or term.key.startswith("label.")):
                having.append(self._ids.get((term.key, _folded(term.value)), frozenset()))
            else:
                rest.append(term)
        few = min(having, key=len, default=self._values.keys())
        remaining = Selector(tuple(rest))
        selected = [each for each in few if all(each in ids for ids in having)]
        return [each for each in selected if remaining.matches(devices[each].device)] if rest else selected

    def _drop(self, value: tuple[str, object], device_id: str) -> None:
        having = self._ids[value]
        having.discard(device_id)
        if not having:
            del self._ids[value]


def _values_of(device: Device) -> Iterator[tuple[str, object]]:
    yield "id", _folded(device.id)
    yield "name", _folded(device.name)
    yield "arch", _folded(device.arch)
    yield "emulated", device.emulated
    for feature in device.features:
        yield "feature", _folded(feature)
    for backend in device.backends:
        yield "backend", _folded(backend)
    for key, value in device.labels.items():
        yield f"label.{key}", _folded(value)


def _folded(value: object) -> object:
    """Return a text in lower case, since selectors ignore the case of values."""
    return value.lower() if isinstance(value, str) else value
