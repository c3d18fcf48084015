"""The threat model of SECURITY.md, a test a line."""
