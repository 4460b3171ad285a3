"""The comparison of two sides: changes of latency, size, memory, accuracy and operators. Pure.

`compare` takes REPORTs of etfarm.report/1 and returns the message Comparison of comparison.proto. Its projection is the document
`etfarm.comparison/1`, in strict JSON with every key, which gates and everything that people read are made of. A PAIR and a
REPORT_NAME below are the projections of ComparedPair and ComparedReport.
"""

from etfarm.wire.comparison.accuracy_gate import EXACT_DB
from etfarm.wire.comparison.document import SCHEMA, compare, document, failed
from etfarm.wire.comparison.gate import UNDECIDED, Gate, Limit
from etfarm.wire.comparison.sides import Side, label, split_choice, traits

__all__ = [
    "EXACT_DB",
    "SCHEMA",
    "UNDECIDED",
    "Gate",
    "Limit",
    "Side",
    "compare",
    "document",
    "failed",
    "label",
    "split_choice",
    "traits",
]
