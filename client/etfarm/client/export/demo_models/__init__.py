"""The demos' modules, three networks of the MLPerf Tiny benchmark.

Source: C. Banbury et al., "MLPerf Tiny Benchmark", NeurIPS Datasets and Benchmarks 2021, and the architecture
tables of
the papers that it takes them from. The modules are written to be readable in a report, with one operator per
line.
"""
