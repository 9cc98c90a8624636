"""Measuring: what a machine can do at best, what the engine does on it, what a peer does beside it.

    offline    prefill, decode, start and memory of one process; no sockets
    compare    two saved results side by side

Each engine runs in a child process of its own (`worker`), and the parent asks them in turn, so
that a slow minute of the machine hits all of them alike.
"""
