"""Jobs, from submission to report.

`submission` validates specs, `model` has the states of cells, and the `conductor` owns the task of each live cell, in which a
`CellRun` (package `cells`) leads the cell through its stages. Every change is written to the database (package `records`) before
it is announced.
"""
