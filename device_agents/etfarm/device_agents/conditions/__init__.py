"""Conditions of a measurement: what is waited for before it, what is set for it, and what is sampled during it.

`gates` waits for a cool and idle device, `governor` sets the cpus' governors and restores them, `sampler` records clocks,
temperatures and load beside a timed pass, and `telemetry` summarizes them.
"""
