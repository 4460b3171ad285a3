"""The correctness of a run: its outputs against a reference, and each operator's values against those of the host."""
