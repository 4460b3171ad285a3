"""The profile of a traced run by operator, read from ETDump, ETRecord and program: kernel times by module and source line."""
