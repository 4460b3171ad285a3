"""The checks that every rpc passes before its servicer: connections, tokens, roles, limits, audit and errors."""
