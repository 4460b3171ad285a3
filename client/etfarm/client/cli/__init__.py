"""The command line, a client of the library: what all commands share, with rooms for commands, workflows and output."""
