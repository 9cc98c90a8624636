"""Engines without sockets: prefill, decode, start and memory, each engine in a process of its own."""
