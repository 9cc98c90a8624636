"""Makes a frozen `Plan` from the sequences chosen for a step. Copies, decides nothing."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xjax.config import SchedulerConfig, StepShapes
from xjax.scheduler.pages.rows import RowTable
from xjax.scheduler.plan import Chunk, Plan
from xjax.scheduler.sequence import Sequence
from xjax.scheduler.sequence.penalties import Pairs

NO_TOKEN = -1


class Draft:
    """The sequences of a step while it is being decided.

    decodes    sequences that compute one token, in order (the values mean nothing)
    chunks     tokens that each prefilling sequence computes
    shape_id   index of the prefill shape, None while there are no chunks
    """

    def __init__(self, shapes: StepShapes) -> None:
        self.decodes: dict[Sequence, None] = {}
        self.chunks: dict[Sequence, int] = {}
        self.shape_id: int | None = None
        self._num_pairs: dict[Sequence, int] = {}
        self._pairs_left = shapes.num_pairs

    def hold_pairs(self, sequence: Sequence) -> bool:
        """Set room aside for the penalties of a sequence; False when the step has none left."""
        penalties = sequence.penalties
        if penalties is None or sequence in self._num_pairs:
            return True
        size = penalties.size(sequence.num_expected_output)
        if size > self._pairs_left:
            return False
        self._num_pairs[sequence] = size
        self._pairs_left -= size
        return True

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out again, because it was preempted."""
        self.decodes.pop(sequence, None)
        self.chunks.pop(sequence, None)
        self._pairs_left += self._num_pairs.pop(sequence, 0)


@dataclass(frozen=True)
class Again:
    """The rows of the plan before, all of them one token on.

    computed, pending, known   by row: tokens in pages, tokens under way, the next token's id or -1
    """

    computed: list[int]
    pending: list[int]
    known: list[int]


def repeat_plan(last: Plan, again: Again, rows: RowTable, *, step_id: int) -> Plan:
    """Freeze the next step of rows that only go on."""
    positions = np.array(again.computed, np.int32)
    return Plan(
        step_id=step_id,
        sequences=last.sequences,
        num_decode=last.num_decode,
        num_rows=last.num_rows,
        prefill=None,
        full=last.full,
        slots=last.slots,
        positions=positions,
        token_ids=np.array(again.known, np.int32),
        tables=rows.pages[:, last.slots],
        samples=last.samples,
        pending=np.array(again.pending, np.int32),
        columns=last.columns,
        recurrent_fresh=positions == 0,
    )


def build_plan(draft: Draft, rows: RowTable, config: SchedulerConfig, *, step_id: int) -> Plan:
    """Freeze a draft; the sequences' progress is still that of before the step."""
    num_decode = len(draft.decodes)
    sequences = (*draft.decodes, *draft.chunks)
    chunks = tuple(_chunk(s, num_decode + place, n) for place, (s, n) in enumerate(draft.chunks.items()))
    samples = [True] * num_decode + [chunk.is_last for chunk in chunks]
    scored = [
        sequences[c.row].tokens(c.start + 1, c.start + 1 + c.num_scored) for c in chunks if c.num_scored
    ]
    pairs, wants_logprobs = _extras(sequences, samples)
    slots = np.array([s.slot for s in sequences], np.int32)
    computed = np.array([s.num_computed for s in sequences], np.int32)
    sizes = config.shapes.decode_rows
    return Plan(
        step_id=step_id,
        sequences=sequences,
        num_decode=num_decode,
        num_rows=sizes[-1] if chunks else next(size for size in sizes if size >= num_decode),
        prefill=config.shapes.prefill[draft.shape_id] if chunks and draft.shape_id is not None else None,
        full=wants_logprobs or bool(pairs) or bool(scored),
        slots=slots,
        positions=computed[:num_decode],
        token_ids=np.array([_known_token(s) for s in draft.decodes], np.int32),
        tables=rows.pages[:, slots],
        samples=np.array(samples, bool),
        pending=np.array([s.in_flight for s in sequences], np.int32),
        columns={name: column[slots] for name, column in rows.columns.items()},
        chunks=chunks,
        pairs=pairs,
        scored_targets=np.concatenate(scored) if scored else np.empty(0, np.int32),
        pool_mean=_pool_mean(sequences, chunks),
        recurrent_fresh=computed == 0,
    )


def _pool_mean(sequences: tuple[Sequence, ...], chunks: tuple[Chunk, ...]) -> npt.NDArray[np.bool_] | None:
    """Rows of which the sum of the hidden states is wanted; None where none of any row are."""
    for chunk in chunks:
        pooling = sequences[chunk.row].request.pooling
        if pooling == "mean" or (pooling is not None and chunk.is_last):
            return np.array([sequence.request.pooling == "mean" for sequence in sequences], bool)
    return None


def _extras(sequences: tuple[Sequence, ...], samples: list[bool]) -> tuple[tuple[Pairs, ...], bool]:
    """Pairs of the rows that sample, and whether one of them wants log-probabilities."""
    pairs: list[Pairs] = []
    wants_logprobs = False
    for row, sequence in enumerate(sequences):
        if not samples[row]:
            continue
        if not wants_logprobs:
            wants_logprobs = sequence.request.sampling.logprobs is not None
        if sequence.penalties is not None:
            own = sequence.penalties.pairs(row, sequence.num_expected_output)
            if own is not None:
                pairs.append(own)
    return tuple(pairs), wants_logprobs


def _known_token(sequence: Sequence) -> int:
    return NO_TOKEN if sequence.in_flight else sequence.last_token


def _chunk(sequence: Sequence, row: int, count: int) -> Chunk:
    start = sequence.num_computed
    return Chunk(
        row=row,
        start=start,
        token_ids=sequence.tokens(start, start + count).copy(),
        is_last=count == sequence.num_left,
        num_scored=min(count, sequence.num_unscored),
    )
