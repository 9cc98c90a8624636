"""Host scheduler: which sequence computes which tokens next. No arrays on a device, no text."""

from xjax.scheduler.pages.moves import Moves, Transfer
from xjax.scheduler.pages.prefix import Prompt
from xjax.scheduler.plan import Chunk, Plan, ScoreArrays, StepResult
from xjax.scheduler.scheduler import Scheduler

__all__ = ["Chunk", "Moves", "Plan", "Prompt", "Scheduler", "ScoreArrays", "StepResult", "Transfer"]
