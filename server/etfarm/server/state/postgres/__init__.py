"""PostgreSQL as the database of one or several servers."""
