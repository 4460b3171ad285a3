"""Access: who may see and change what. Principals, projects and scopes; the rpc edge asks, the other rooms take values."""
