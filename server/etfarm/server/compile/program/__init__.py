"""Exported programs in a compiling child: loading them, values of tensors, source places, and clear errors. Uses torch."""
