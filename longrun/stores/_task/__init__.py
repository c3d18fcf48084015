"""The parts of the task store, which is `longrun.stores.task`."""
