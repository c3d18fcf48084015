"""Planted bugs, one at a time, each caught by a test that was there before: the proof that the tests can fail."""
