"""Makes a frozen `Plan` from the sequences chosen for a step. Copies, decides nothing."""

import numpy as np

from xjax.config import SchedulerConfig, StepShapes
from xjax.scheduler.penalties import Pairs
from xjax.scheduler.plan import Chunk, Plan
from xjax.scheduler.rows import RowTable
from xjax.scheduler.sequence import Sequence

_NO_TOKEN = -1


class Draft:
    """The sequences of a step while it is being decided.

    counts     tokens that each sequence computes; decodes were added first
    shape_id   index of the prefill shape, None while there are no chunks
    """

    def __init__(self, shapes: StepShapes) -> None:
        self.counts: dict[Sequence, int] = {}
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

    def add(self, sequence: Sequence, count: int) -> None:
        """Let a sequence compute `count` tokens."""
        self.counts[sequence] = count

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out again, because it was preempted."""
        self.counts.pop(sequence, None)
        self._pairs_left += self._num_pairs.pop(sequence, 0)


def build_plan(draft: Draft, rows: RowTable, config: SchedulerConfig, *, step_id: int) -> Plan:
    """Freeze a draft; the sequences' progress is still that of before the step."""
    decodes = [s for s in draft.counts if s.is_decoding]
    others = [s for s in draft.counts if not s.is_decoding]
    sequences = (*decodes, *others)
    chunks = tuple(_chunk(s, len(decodes) + place, draft.counts[s]) for place, s in enumerate(others))
    samples = np.array([True] * len(decodes) + [chunk.is_last for chunk in chunks], bool)
    pairs: list[Pairs] = []
    full = False
    for row, sequence in enumerate(sequences):
        if samples[row]:
            full = full or sequence.request.sampling.logprobs is not None
            if sequence.penalties is not None:
                own = sequence.penalties.pairs(row, sequence.num_expected_output)
                pairs += [own] if own is not None else []
    scored = [s.tokens(c.start + 1, c.start + 1 + c.num_scored) for s, c in zip(others, chunks, strict=True)]
    slots = np.array([s.slot for s in sequences], np.int32)
    sizes = config.shapes.decode_rows
    return Plan(
        step_id=step_id,
        sequences=sequences,
        num_decode=len(decodes),
        num_rows=sizes[-1] if chunks else next(size for size in sizes if size >= len(decodes)),
        prefill=config.shapes.prefill[draft.shape_id] if chunks and draft.shape_id is not None else None,
        full=full or bool(pairs) or any(chunk.num_scored for chunk in chunks),
        slots=slots,
        positions=np.array([s.num_computed for s in decodes], np.int32),
        token_ids=np.array([_known_token(s) for s in decodes], np.int32),
        tables=rows.pages[:, slots],
        samples=samples,
        pending=np.array([s.in_flight for s in sequences], np.int32),
        columns={name: column[slots] for name, column in rows.columns.items()},
        chunks=chunks,
        pairs=tuple(pairs),
        scored_targets=np.concatenate(scored) if scored else np.empty(0, np.int32),
        recurrent_fresh=np.array([s.num_computed == 0 for s in sequences], bool),
    )


def _known_token(sequence: Sequence) -> int:
    if sequence.in_flight:
        return _NO_TOKEN
    return int(sequence.tokens(sequence.num_tokens - 1, sequence.num_tokens)[0])


def _chunk(sequence: Sequence, row: int, count: int) -> Chunk:
    start = sequence.num_computed
    return Chunk(
        row=row,
        start=start,
        token_ids=sequence.tokens(start, start + count).copy(),
        is_last=count == sequence.num_left,
        num_scored=min(count, sequence.num_unscored),
    )
