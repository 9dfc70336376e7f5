"""Alembic's entry: on the connection of `tuner.history.maintenance`, or on `TUNER_DATABASE_URL`."""

from alembic import context
from sqlalchemy import Connection

from tuner.history.database import WRITE, Database
from tuner.history.tables import VERSION_TABLE, metadata
from tuner.settings import Settings


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        render_as_batch=connection.dialect.name == "sqlite",
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    database = Database(Settings().url)
    database.make_folder()
    with database.engine.connect().execution_options(**{WRITE: True}) as opened, opened.begin():
        run(opened)
