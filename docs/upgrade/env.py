"""Alembic's entry: the connection comes from `etfarm.server.state.engine`."""

from alembic import context

from etfarm.server.state.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
