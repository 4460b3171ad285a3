"""The gRPC side of the server: the checks that every call passes, and one servicer for each service of the contract."""
