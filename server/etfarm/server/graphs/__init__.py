"""Facts of exported graphs that compiling and reporting both use: the source line and the operators of a node."""
