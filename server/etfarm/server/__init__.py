"""The compile server: accepts jobs, lowers models, sends programs to devices, and reports the results."""
