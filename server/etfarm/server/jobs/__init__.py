"""Jobs, from submission to report.

`submission` validates what is submitted, `model` has the states of cells, and the `conductor` keeps the task of each live cell,
in which a `CellRun` (room `cells`) leads the cell through its stages. Every change is written to the database (room `records`)
before it is announced.
"""
