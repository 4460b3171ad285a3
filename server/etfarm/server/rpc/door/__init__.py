"""The door of the server: what every rpc passes before a servicer sees it. Connections, tokens, roles, limits, audit, errors."""
