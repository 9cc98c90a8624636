"""Bring model files here: what a name means, and bounded attempts to download it."""
