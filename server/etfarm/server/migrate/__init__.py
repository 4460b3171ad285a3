"""The move of a stopped farm to other engines, on a server's machine: `etfarm migrate`."""
