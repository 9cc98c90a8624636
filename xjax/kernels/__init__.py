"""Arrays in, arrays out: one operation a folder, its contract in front, one backend a file.

This package knows no model and no state; `backend` is a static name chosen by the caller.
"""
