"""The database of jobs, devices and reports: engine, schema, migrations, and the paging of lists."""
