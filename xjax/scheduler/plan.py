"""What the scheduler decides for one step, and what it hears back: frozen values.

Rows of a step: decodes first, one token each, then prefill chunks. Sampled positions: one a row in
the same order, then the prompt positions whose log-probabilities were asked for. `Plan` holds
copies of everything the step needs, so later decisions do not change it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from xjax.scheduler.sequence import Sequence
from xjax.scheduler.sequence.penalties import Pairs


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence that are prefilled in a step.

    row          row of the step
    start        position of the first token
    token_ids    [n] int32
    is_last      the last token's logits give the next token
    num_scored   leading tokens whose successor's log-probability is wanted
    """

    row: int
    start: int
    token_ids: npt.NDArray[np.int32]
    is_last: bool
    num_scored: int = 0

    @property
    def length(self) -> int:
        """Tokens in the chunk."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Plan:
    """One step.

    sequences       one a row; decodes first
    num_decode      rows that decode
    num_rows        B of the step's shape, at least the number of sequences
    prefill         (tokens, tile) of the step's shape, or None
    full            whether the full body is needed
    slots           [rows] int32   running rows
    positions       [decodes] int32
    token_ids       [decodes] int32   -1 where the token is not known yet
    tables          [G, rows, M] int32
    samples         [rows] bool   whether the row's token counts
    pending         [rows] int32   1: a sampled token is still under way
    columns         sampling parameters by field name, [rows, ...]; the very object of the plan before
                    when only positions, tokens and tables differ from it
    scored_targets  [scored] int32   ids asked about, chunk after chunk
    pool_mean       [rows] bool   rows of which the sum of the hidden states is wanted, else the last one;
                    None where no row's are
    """

    step_id: int
    sequences: tuple[Sequence, ...]
    num_decode: int
    num_rows: int
    prefill: tuple[int, int] | None
    full: bool
    slots: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    samples: npt.NDArray[np.bool_]
    pending: npt.NDArray[np.int32]
    columns: dict[str, npt.NDArray[Any]]
    chunks: tuple[Chunk, ...] = ()
    pairs: tuple[Pairs, ...] = ()
    scored_targets: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    pool_mean: npt.NDArray[np.bool_] | None = None
    recurrent_fresh: npt.NDArray[np.bool_] | None = None  # [rows] bool, rows that start from the zero state

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens computed in the step."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True)
class ScoreArrays:
    """Log-probabilities of a full step, numpy, indexed by sampled position.

    logprob        [J] float32
    rank           [J] int32
    top_ids        [J, 20] int32
    top_logprobs   [J, 20] float32
    """

    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class StepResult:
    """What came back from the device, numpy, indexed by sampled position.

    token    [J] int32
    flags    [J] int32   bit 0: the logits were not finite
    scores   of a full body: gives its log-probabilities; called at most once, maybe on another thread
    pooled   [B, E] float32, of a step that pools hidden states, by row
    """

    token: npt.NDArray[np.int32]
    flags: npt.NDArray[np.int32]
    scores: Callable[[], ScoreArrays] | None = None
    pooled: npt.NDArray[np.float32] | None = None
