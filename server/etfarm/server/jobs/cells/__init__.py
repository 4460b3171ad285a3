"""Cells on their way: one run of a cell, its requirements, its placement on a device, its dispatch and its results."""
