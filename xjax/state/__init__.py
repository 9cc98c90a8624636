"""What lives on the device between steps and what a step is given: pytrees and their layouts.

Frozen values and pure functions; no sequence, no policy, no model.
"""
