"""Facts of exported graphs, used by compilation and reports: the source line and the operators of a node."""
