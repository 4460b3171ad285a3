"""Data sets: many samples through programs on several devices, with their outputs and metrics."""
