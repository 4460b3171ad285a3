"""Devices: the known ones, the agents that serve them, their attempts, and the assignment of cells to them."""
