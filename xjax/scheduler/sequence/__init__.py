"""One sample of a request while it lives, and what it is penalized for."""

from xjax.scheduler.sequence.sequence import CacheProgress, Sequence, Status, SwappedPages

__all__ = ["CacheProgress", "Sequence", "Status", "SwappedPages"]
