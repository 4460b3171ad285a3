"""Primitives of the Linux sandbox that the server's children and the agent's runners share. Standard library only.

`syscalls` wraps what Python's `os` lacks, `seccomp` builds and installs system call filters. They act on the calling process,
which must have one thread, and are independent of jobs: the caller decides which measures apply in which order.
"""
