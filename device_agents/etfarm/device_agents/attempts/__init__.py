"""Attempts, which cover everything between the server's StartRun and the result whose artifacts are uploaded.

`attempt` runs candidates one after the other, `interleaved` in rounds, `session` serves a program's methods to callers. They
share `fetch`, `cache` and `transfers` (artifacts), `passes` and `drift` (timing), `numerics` and `output_diff` (outputs),
`progress` (reports to the server during the attempt) and `fault_attribution` (whether the program or the device failed).
"""
