"""Facts of exported graphs that compiling and reporting both use: which source line and which operator a node comes from."""
