"""Conversion of a user's model, inputs and recipes to a submission, before any call to the farm."""
