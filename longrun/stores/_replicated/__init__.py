"""The parts of the replicated store: who is active, what is copied, and how the two are made equal again."""
