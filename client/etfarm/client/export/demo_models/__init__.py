"""Step 1, client: the demos' modules, three networks of the MLPerf Tiny benchmark.

Source: C. Banbury et al., "MLPerf Tiny Benchmark", NeurIPS Datasets and Benchmarks 2021, and the architecture tables of
the papers that it takes them from. The modules are ours, written to be read in a report: one operator per line.
"""
