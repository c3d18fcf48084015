"""The parts of the file store, from the system calls up.

Place in the life of an execution: claim, checkpoint, finish.

::

    disk      every system call, in one seam
    lines     one JSON line with its checksum and identity
    forms     records as plain JSON, and back
    place     the directory: names, marker, bell, quarantine
    contents  what the lines of a journal add up to
    journal   one journal: read it, append to it, replace it
    inbox     messages, from anybody
    entries   what is known of every live execution
    catalog   the same, kept up with what other processes do
    done      finished executions and the index of them
    owners    leases
    writes    a batch of saves, creations or messages
    claims    a batch of executions changes hands
"""
