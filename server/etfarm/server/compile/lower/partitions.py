"""Partitions of a graph that can all become delegates: no two of them wait for each other's outputs.

ExecuTorch 1.5 joins two partitions if nothing outside of them leads from one to the other, but does not count what the other
partitions will be. Where two branches have two parts each, it joins the first part of each with the second part of the other:
either delegate then needs the other's outputs ("Invalid partition, found dependency cycles"). Attention that is called twice with
one input is an example.

Source: `_can_merge_partitions` of executorch/exir/backend/canonical_partitioners/group_partitioner.py 1.5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from typing import Any

from executorch.exir.backend.canonical_partitioners.group_partitioner import GroupBasedPartitioner


def generate_without_cycles(generate: Callable[[Any], Sequence[Any]], program: Any) -> Sequence[Any]:
    """Return a partitioner's partitions of an edge program; join fewer of them if they would wait for each other.

    Args:
        generate: the partitioner's own `generate_partitions`.
    """
    partitions = generate(program)
    if not has_cycle(program.graph, partitions):
        return partitions
    with _joined_with_care():
        return generate(program)


def has_cycle(graph: Any, partitions: Sequence[Any]) -> bool:
    """Return whether partitions of a graph need each other's outputs."""
    owners = {node: partition.id for partition in partitions for node in partition.nodes}
    sorter: TopologicalSorter[Any] = TopologicalSorter()
    for node in graph.nodes:
        owner = owners.get(node, node)
        sorter.add(owner, *(source for each in node.all_input_nodes if (source := owners.get(each, each)) != owner))
    try:
        sorter.prepare()
    except CycleError:
        return True
    return False


@contextmanager
def _joined_with_care() -> Iterator[None]:
    """Let partitions be joined only if no path through other partitions leads from one to the other."""
    original = GroupBasedPartitioner._can_merge_partitions
    owners: dict[Any, Any] = {}
    count = 0

    def can_merge(partitioner: Any, first: Any, second: Any, partitions: Mapping[Any, Any]) -> bool:
        nonlocal count
        if not original(partitioner, first, second, partitions):
            return False
        if count != len(partitions):  # each join leaves one less
            count = len(partitions)
            owners.update({node: partition for partition in partitions.values() for node in partition.nodes})
        return not _reaches_itself({*partitions[first].nodes, *partitions[second].nodes}, owners)

    GroupBasedPartitioner._can_merge_partitions = can_merge
    try:
        yield
    finally:
        GroupBasedPartitioner._can_merge_partitions = original


def _reaches_itself(joined: Collection[Any], owners: Mapping[Any, Any]) -> bool:
    """Return whether a path from nodes leads back to them through others, all of a partition's nodes being one step."""
    queue = [user for node in joined for user in node.users if user not in joined]
    seen: set[Any] = set()
    while queue:
        node = queue.pop()
        if node in joined:
            return True
        if node not in seen:
            step = owners[node].nodes if node in owners else (node,)
            seen.update(step)
            queue.extend(user for each in step for user in each.users if user not in seen)
    return False
