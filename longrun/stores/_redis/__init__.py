"""The parts of the Redis and Valkey store; `longrun.stores.redis` is the way in."""
