"""Sessions: a program that stays loaded on a device of a farm, or in a local runner, and is called with inputs."""
