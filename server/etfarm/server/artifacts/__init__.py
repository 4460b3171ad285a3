"""Blobs by digest: the store that models, programs, traces and outputs live in."""
