"""Backup and restore of a server's data folder, on the server's machine: `etfarm backup` and `etfarm restore`."""
