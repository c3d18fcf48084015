"""The parts of the PostgreSQL store: connections, migrations, writing, claiming, loading, finding, listening."""
