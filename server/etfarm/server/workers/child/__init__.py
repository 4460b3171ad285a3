"""The processes beside the daemon: the forkserver, and for each task a supervisor and its child."""
