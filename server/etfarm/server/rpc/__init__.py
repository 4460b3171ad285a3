"""The gRPC side of the server: the door, which every call passes, and one servicer for each service of the contract."""
