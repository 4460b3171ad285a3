"""Reports of measurements, computed from a device's samples, outputs and traces.

`analyst` requests an analysis, `findings` runs it in a jailed child (`analyze`) and keeps its result, `assembly` puts a cell's
report together, and `verdict` judges whether its measurement can be trusted. The rooms below hold what the child computes:
`trace`, `numerics` and `latency`.
"""
