"""Operation of a server: its settings and their sources, metrics, logs, traces, the service manager, and the graceful stop."""
