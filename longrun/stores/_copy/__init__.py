"""The parts of `longrun.stores.copy`: what belongs together, and whether two stores have the same."""
