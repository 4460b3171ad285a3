"""Administration of a farm: projects, tokens, the audit log and the artifact store."""
