"""The parts of the file store, from the system calls up.

Place in the life of an execution: claim, checkpoint, finish. Each module imports only those above it::

    disk      every system call, in one seam
    queue     many syncs in one call, where the kernel has it
    syncing   threads that wait for the disk
    lines     one JSON line with its checksum and identity
    forms     records as plain JSON, and back
    place     the directory: names, marker, bell, locks, quarantine
    contents  what the lines of a journal add up to
    reading   where a journal is, and what it says
    history   rows of old checkpoints
    journal   a journal of ours: append to it, replace it, remove what is over
    inbox     messages, from anybody
    owners    leases
    entry     what is known of a live execution
    entries   the same of all of them, and who is due
    catalog   the same, kept up with what other processes do
    skim      the index of finished executions, unparsed
    done      finished executions and the index of them
    moving    journals on their way to done/, and back
    mine      the journals that this process owns
    tidying   what can wait
    births    a new execution, a new message
    appends   what one journal gets in a batch
    lean      a batch of moves, to journals that are at hand
    saves     a batch of saves
    writes    a batch of writes of any kind
    claims    executions change hands
    removal   finished executions are deleted
"""
