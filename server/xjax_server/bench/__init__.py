"""Measuring: what a machine can do at best, what the engine does on it, what a peer does beside it.

    offline/    prefill, decode, start and memory of one process; no sockets
    loading/    seconds and memory of loading a random model
    cache/      hits of the prefix cache, and work in a pool that is too small
    quality/    one configuration against another: perplexity, greedy tokens
    serving/    a load client against any OpenAI-compatible server
    beside/     our server and its peers, started as children and asked in turn
    commands/   what `xjax bench` does with all of it
    machine     what the machine is, and how fast it reads and multiplies just now
    programs    programs of peers, and how they were built
    samples     medians, percentiles, and None where nothing was measured
    compare     two saved results side by side

Every subject runs in a child process of its own, and the parent asks them in turn, so that a slow
minute of the machine hits all of them alike.
"""
