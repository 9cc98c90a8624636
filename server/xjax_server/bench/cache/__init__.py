"""What the prefix cache and partial swap are worth.

subject   an engine with one setting of cache and swap, in a child process
run       hits beside cold prompts; the same work under each way to run out of pages
report    tables and figures of a saved result
"""
