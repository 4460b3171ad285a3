"""The command `etfarm report` and its subcommands."""
