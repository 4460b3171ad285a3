"""Runs of cells: the stages of a run, its requirements, its placement on a device, its dispatch and its results."""
