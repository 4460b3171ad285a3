"""Backup and restore of a farm, on the server's machine: `etfarm backup` and `etfarm restore`."""
