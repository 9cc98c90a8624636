"""Property tests without a time limit for each example: test machines are shared and slow."""

from hypothesis import settings

settings.register_profile("text", deadline=None)
settings.load_profile("text")
