"""Where jobs, devices and reports are written down: engine, schema and migrations. Knows nothing of what they mean."""
