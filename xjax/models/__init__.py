"""Model families: parameters, forward and logits as pure functions, one family a file.

Nothing here reads a file or knows who the tokens belong to; `registry` finds a family by name.
"""
