"""The demos' modules, three networks of the MLPerf Tiny benchmark, each with a file of its weights and inputs.

Source: C. Banbury et al., "MLPerf Tiny Benchmark", NeurIPS Datasets and Benchmarks 2021, and the architecture tables of the
papers that it takes them from. The modules are written to be readable in a report, with one operator per line.
"""

from __future__ import annotations

from typing import Final

SAMPLES_KEY: Final = "calibration_inputs"
"""Name of the inputs in a demo's .npz file, an array (samples, C, H, W); the other arrays are the module's state by its names.

Both are float32, or float16 where that loses nothing.
"""
