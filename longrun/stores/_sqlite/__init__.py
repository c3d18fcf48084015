"""The parts of the SQLite store: the file (`file`), its statements (`sql`), writing, claiming, loading and finding."""
