"""Steps 1 and 10, client: the commands. Each module is one `etfarm` command, and is imported only when that is called."""
