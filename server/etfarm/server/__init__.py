"""The compile server: jobs in, programs to devices, reports out."""
