"""Other libraries doing the same jobs, each in a process of its own, with the interpreter it is installed in.

Place in the life of a measurement: beside it. `catalogue` says which there are; each `peer_*` module is a program that
needs nothing but the standard library and its peer.
"""
