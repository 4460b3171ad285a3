"""The health of devices beside their states: faults that count less as they age, health runs, quarantine, and power cycles.

`standing` and `baseline` are the rules, as pure functions; `book` keeps the devices' standings in memory and in the database.
The health runs themselves are attempts, and therefore in `etfarm.server.jobs.health`.
"""
