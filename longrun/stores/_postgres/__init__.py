"""The parts of the PostgreSQL store: connections, migrations, arrays, writing, claiming, loading, finding, listening."""
