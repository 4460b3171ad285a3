"""The comparison of two sides, `etfarm.comparison/1`: changes of latency, size, memory, accuracy and operators. Pure.

Takes REPORTs of etfarm.report/1 and returns one document in strict JSON, with every key and null for absent values. Its keys are
the fields of Comparison in comparison.proto, and what is known only where the document is written:

    {schema, base: SIDE, candidate: SIDE, ..., gate: GATE|null, error: ERROR|null}
    SIDE         {..., file}                               `file` is the path of a side that is no job of a farm
    GATE         {limits[{metric, limit, unit}], strict, accept_invalid, passed, outcome: passed|failed|inconclusive,
                  reasons[FINDING], notes[FINDING]}        `passed` is whether the outcome is
    FINDING      {pair, metric, code, message}             `pair` is an index of pairs; null for the whole document
"""

from etfarm.wire.comparison.accuracy_gate import EXACT_DB
from etfarm.wire.comparison.document import SCHEMA, compare, failed
from etfarm.wire.comparison.gate import UNDECIDED, Gate, Limit, judge
from etfarm.wire.comparison.message import from_message, to_message
from etfarm.wire.comparison.sides import Side, label, split_choice, traits

__all__ = [
    "EXACT_DB",
    "SCHEMA",
    "UNDECIDED",
    "Gate",
    "Limit",
    "Side",
    "compare",
    "failed",
    "from_message",
    "judge",
    "label",
    "split_choice",
    "to_message",
    "traits",
]
