"""Workflows of commands: one job from its submission to its result, or a data set through sessions."""
