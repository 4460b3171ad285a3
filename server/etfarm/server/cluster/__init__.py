"""Several servers of one farm: one of them leads, by a lease in the database, and the others forward calls to it."""
