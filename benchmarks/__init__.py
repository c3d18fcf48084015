"""longrun against its limits and its peers: `python -m benchmarks` runs the jobs and prints one table.

The map follows a measurement; imports only go down this list.

    ask        __main__   the command line; targets: whether figures can be kept where they are to go;
               run: rounds, interleaved; peers: other libraries, where installed
    place      places     a fresh directory, database or server for each measurement
    measure    child      one measurement in a process of its own; helpers: processes that it starts itself
    jobs       steps (J1, J1x10, J2, J2x5), large (J3), recovery (J4), cold (J5), parked (J6), latency (J7),
               items (J8), workers (J9); bare: the same work without a library
    tell       plots      the pictures; page: the table on a page; results: medians, spread, ratios, goals, JSON;
               machine: what it ran on

Below all of them: orders (what a job is), samples.

Every figure comes from a fresh child process that checks its answer and the stored rows before it reports.
"""
