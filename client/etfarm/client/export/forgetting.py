"""State outside of buffers, such as `self.h = h`, `self.n += 1` and `self.cache.append(k)`, which programs forget."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.attributes import Change, Snapshot
from etfarm.client.export.calls import difference_of, outputs_of, tensors_kept, values_kept

if TYPE_CHECKING:
    from torch import Tensor, nn

_MIN_CALLS: Final = 3
"""Number of further calls that are compared with the first one: what counts to 3 changes nothing before."""
_MAX_CALLS: Final = 16
_CALLS_S: Final = 1.0
"""Duration in s of further calls after which there are no more than the minimum: a quick model may count to more."""
_NAMED_APART: Final = 8
_MAX_TENSOR: Final = 1 << 28
"""Size in bytes of a tensor that is copied before an export; a larger one is more likely a data set than a state."""
_SLOW_S: Final = 5.0
"""Duration of a call in s from which only the next one is compared."""


@dataclass(frozen=True)
class EagerCall:
    """A call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_other_inputs(self) -> EagerCall:
        """Return it with inputs of the same shapes: smaller floats, and integers in another order, so that they stay valid."""
        import torch
        from torch.utils import _pytree as pytree

        def changed(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.is_floating_point():
                return (leaf.detach().double() * 0.75).to(leaf.dtype)
            return leaf.flip(-1) if leaf.dim() else leaf

        args, kwargs = pytree.tree_map(changed, (self.args, self.kwargs))
        return EagerCall(self.module, args, kwargs)


@contextmanager
def attributes_kept(module: nn.Module, *, is_called: bool) -> Iterator[Attributes]:
    """Put back what an export changes of the state outside of buffers, and note whether its call changed any.

    torch.export restores attributes of modules only in part, and leaves its own tensors in other objects.

    Args:
        is_called: whether the module is called meanwhile; a strict export reads its code instead.
    """
    before = Snapshot(module)
    attributes = Attributes(module, before, is_changed=not is_called)
    hook = module.register_forward_hook(lambda *_: attributes.note()) if is_called else None
    # An export executes what is written into a tensor outside of buffers without an input, such as `self.n += 1`.
    small = [tensor for tensor in before.tensors if tensor.nbytes <= _MAX_TENSOR]
    try:
        with values_kept(small):
            yield attributes
    finally:
        if hook is not None:
            hook.remove()
        before.restore()


@dataclass
class Attributes:
    """The attributes of a module before an export."""

    module: nn.Module
    before: Snapshot
    is_changed: bool
    """Whether a call changed any; True if that is unknown."""

    def note(self) -> None:
        """Note whether the attributes differ now."""
        self.is_changed = self.is_changed or bool(self.before.changes())

    def forgotten(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        written: tuple[Tensor, ...] = (),
        others: Sequence[EagerCall] = (),
        *,
        limit_s: float = 20.0,
    ) -> list[str]:
        """Return the names of attributes and variables that calls change and whose new values change the outputs of later ones.

        What only saves work, such as a mask that was made by the first call, is none of these. The module is called in eager mode
        a few times, and left as it was.

        Args:
            written: parameters that calls write to.
            others: calls of the model's other methods, which may read what this one writes.
            limit_s: duration in s of all calls after which there are no more, but for a second one: what is known by then is the
                answer.
        """
        probe = _Probe(self.before, EagerCall(self.module, args, dict(kwargs)), written, others, time.monotonic(), limit_s)
        try:
            return list(dict.fromkeys(probe.forgotten()))
        finally:
            self.before.restore()


@dataclass(frozen=True)
class _Probe:
    """Eager calls of a module from different states."""

    before: Snapshot
    call: EagerCall
    written: tuple[Tensor, ...]
    others: Sequence[EagerCall]
    started: float
    """When the calls began, on the monotonic clock."""
    limit_s: float

    def forgotten(self) -> list[str]:
        first = self._outputs(self.call)
        called_s = time.monotonic() - self.started
        is_slow = called_s > _SLOW_S
        changes = self.before.changes()
        if isinstance(first, str) or not changes:  # it does not run in eager mode, or only an export changes it
            return []
        later = Snapshot(self.call.module)
        for count in range(1 if is_slow else _MAX_CALLS):
            if count and self._is_late():
                break
            if count >= _MIN_CALLS and time.monotonic() - self.started > called_s + _CALLS_S:
                break
            latest = self.before.changes()
            if self._differs(self.call, first):
                return [change.path for change in latest] if is_slow else self._named(latest, self.call, first)
        # The first inputs may be what it keeps, and others are needed to see that.
        for call in () if is_slow else (self.call.with_other_inputs(), *self.others):
            if self._is_late():
                break
            later.restore()
            after = self._outputs(call)
            self.before.restore()
            at_first = self._outputs(call)
            if _differ(after, at_first):
                return self._named(changes, call, at_first)
        return []

    def _is_late(self) -> bool:
        return time.monotonic() - self.started > self.limit_s

    def _named(self, changes: list[Change], call: EagerCall, expected: list[Any] | str) -> list[str]:
        """Return the changes that change outputs each by itself; all if there is none."""
        named = []
        for change in changes if 1 < len(changes) <= _NAMED_APART else ():
            if self._is_late():
                break
            self.before.restore()
            change.apply()
            if self._differs(call, expected):
                named.append(change.path)
        return named or [change.path for change in changes]

    def _differs(self, call: EagerCall, expected: list[Any] | str) -> bool:
        return _differ(self._outputs(call), expected)

    def _outputs(self, call: EagerCall) -> list[Any] | str:
        """Return the outputs from the present state, or what was raised; what the program keeps is put back."""
        # Of another method's module, attributes are put back as well, since its program is exported from them.
        other = Snapshot(call.module) if call.module is not self.call.module else None
        tensors = (*self.before.tensors, *self.written, *(other.tensors if other is not None else ()))
        with tensors_kept(call.module, tensors):
            try:
                return outputs_of(call.module, call.args, call.kwargs)
            except Exception as error:  # noqa: BLE001 - the module is the user's; the export shows its exceptions
                return f"{type(error).__name__}: {error}"
            finally:
                if other is not None:
                    other.restore()


def _differ(outputs: list[Any] | str, expected: list[Any] | str) -> bool:
    if isinstance(outputs, str) or isinstance(expected, str):
        return isinstance(outputs, str) != isinstance(expected, str)
    return bool(difference_of(outputs, expected))
