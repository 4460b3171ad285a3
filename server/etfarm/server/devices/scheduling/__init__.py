"""The rules of scheduling, without I/O: the order of waiting cells, the devices that fit them, and why a cell waits."""
