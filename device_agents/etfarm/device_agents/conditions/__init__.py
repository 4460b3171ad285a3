"""The conditions of a measurement: awaited before it, set for it, and sampled during it.

`gates` waits for a cool and idle device, `governor` sets the cpus' governors and restores them, `sampler` records clocks,
temperatures and load during a timed pass, and `telemetry` summarizes them.
"""
