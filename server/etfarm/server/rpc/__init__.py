"""The server's edge: one servicer a resource, one interceptor that knows who calls, one table from errors to statuses."""
