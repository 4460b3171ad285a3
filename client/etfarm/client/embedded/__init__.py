"""The embedded farm: a lease starts it for a command that names no server, a supervisor ends it with its last user."""
