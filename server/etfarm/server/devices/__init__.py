"""Devices: which are known, which agents serve them, what runs on them, and which run goes where."""
