"""The names of a program's outputs, which are the same in reports, sessions, data sets and files.

An output's name consists of the keys and positions that lead to it in the structure that the model returns: `logits`,
`hidden_states_0`. One without a key is named by its position in flattened order, as text; so are outputs whose names are equal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from etfarm.wire.tensors import MAX_NAME_CHARACTERS

_DICTS: Final = ("builtins.dict", "collections.OrderedDict")
_DEFAULTDICT: Final = "collections.defaultdict"


def names_of_structure(structure: str) -> tuple[str, ...]:
    """Return the names of the leaves of a serialized pytree, `treespec_dumps` of torch.

    Raises:
        ValueError, KeyError, TypeError, IndexError, RecursionError: it is not a pytree.
    """
    return distinct_names(list(_names(json.loads(structure)[1])))


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return usable names: the position as text for a name that is empty, too long, not text, or another output's, too."""
    usable = [0 < len(name) <= MAX_NAME_CHARACTERS and _is_text(name) for name in names]
    while True:
        result = tuple(name if usable[place] else str(place) for place, name in enumerate(names))
        counts = Counter(result)
        repeated = [place for place, name in enumerate(result) if usable[place] and counts[name] > 1]
        if not repeated:
            return result
        for place in repeated:
            usable[place] = False


def _names(spec: dict[str, Any], parts: tuple[str, ...] = (), has_key: bool = False) -> Iterator[str]:
    """Yield the name of each leaf; empty for one that no key leads to."""
    children, kind = spec["children_spec"], spec["type"]
    if kind is None:
        yield "_".join(parts) if has_key else ""
    elif kind in _DICTS or kind == _DEFAULTDICT:
        context = spec["context"]
        keys = context["dict_context"] if kind == _DEFAULTDICT else json.loads(context)
        for key, child in zip(keys, children, strict=True):
            # An empty key adds nothing to a name.
            yield from _names(child, (*parts, str(key)) if key != "" else parts, has_key or key != "")
    else:
        for place, child in enumerate(children):
            yield from _names(child, (*parts, str(place)), has_key)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
