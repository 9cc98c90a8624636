"""Quantized folders: what their config says, and the tensors that make one matrix of codes.

Each format is a file; all end in `codes.Codes`, which keeps the codes as they are. Nothing here knows
jax or what a matrix is for.
"""
