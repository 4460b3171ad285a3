"""Access control: principals, projects and scopes. The rpc edge asks; the other rooms take values."""
