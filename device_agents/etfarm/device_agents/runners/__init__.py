"""Runs programs on this machine: a bundle, a process started from it, and the commands it answers."""
