"""The measures that isolate a child from its host, and the files that it can see."""
