"""Killable, jailed children for everything that loads torch or a user's bytes: a prewarmed forkserver and its pool."""
