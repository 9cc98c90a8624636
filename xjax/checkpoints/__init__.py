"""Model files: names to local paths, files to named numpy views and metadata.

This package knows no jax and nothing of how a tensor is used.
"""
