"""Checks of uploaded bytes before anything loads them. Standard library only: the daemon runs them, and each child again."""
