"""The database of jobs, devices and reports: engine, schema, migrations, and paging."""
