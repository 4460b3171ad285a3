"""Artifacts: the store of models, programs, traces and outputs by digest."""
