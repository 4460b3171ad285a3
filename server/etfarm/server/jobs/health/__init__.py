"""Health runs: attempts with the farm's own program, whose outputs are known.

`program` has the programs, `run` leads one attempt, and `probing` decides which device is probed when.
"""
