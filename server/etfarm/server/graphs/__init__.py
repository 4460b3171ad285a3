"""Facts of exported graphs, their calls and comparisons of their outputs, used by compilation and reports."""
