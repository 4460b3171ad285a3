"""The processes besides the daemon: the forkserver, and a supervisor and a child for each task."""
