"""Makes a frozen `Plan` from the sequences chosen for a step. Copies, decides nothing."""

import numpy as np

from xjax.config import SchedulerConfig, StepShapes
from xjax.scheduler.plan import Chunk, Pairs, Plan
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
        self._pairs_left = shapes.num_pairs

    def has_pairs_for(self, sequence: Sequence) -> bool:
        """Whether the step still has room for the penalties and biases of a sequence."""
        return _num_pairs(sequence) <= self._pairs_left

    def add(self, sequence: Sequence, count: int) -> None:
        """Let a sequence compute `count` tokens."""
        self.counts[sequence] = count
        self._pairs_left -= _num_pairs(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out again, because it was preempted."""
        if self.counts.pop(sequence, None) is not None:
            self._pairs_left += _num_pairs(sequence)


def build_plan(draft: Draft, rows: RowTable, config: SchedulerConfig, *, step_id: int) -> Plan:
    """Freeze a draft; the sequences' progress is still that of before the step."""
    decodes = [s for s in draft.counts if s.is_decoding]
    others = [s for s in draft.counts if not s.is_decoding]
    sequences = tuple(decodes + others)
    chunks = tuple(_chunk(s, len(decodes) + i, draft.counts[s]) for i, s in enumerate(others))
    samples = np.array([True] * len(decodes) + [chunk.is_last for chunk in chunks], bool)
    pairs = tuple(p for row, s in enumerate(sequences) if samples[row] and (p := _pairs(s, row)) is not None)
    scored = [s.tokens(c.start + 1, c.start + 1 + c.num_scored) for s, c in zip(others, chunks, strict=True)]
    full = bool(pairs) or any(chunk.num_scored for chunk in chunks) or any(_wants_logprobs(s) for s in sequences)
    slots = np.array([s.slot for s in sequences], np.int32)
    sizes = config.shapes.decode_rows
    return Plan(
        step_id=step_id,
        sequences=sequences,
        num_decode=len(decodes),
        num_rows=sizes[-1] if chunks else next(size for size in sizes if size >= len(decodes)),
        prefill=config.shapes.prefill[draft.shape_id] if chunks and draft.shape_id is not None else None,
        full=full,
        slots=slots,
        positions=np.array([s.num_computed for s in decodes], np.int32),
        token_ids=np.array([_known_token(s) for s in decodes], np.int32),
        tables=rows.pages[:, slots],
        samples=samples,
        pending=np.array([s.in_flight for s in sequences], np.int32),
        columns={name: column[slots] for name, column in rows.columns.items()},
        chunks=chunks,
        pairs=pairs,
        scored_targets=np.concatenate(scored) if scored else np.empty(0, np.int32),
        recurrent_fresh=np.array([s.num_computed == 0 for s in sequences], bool),
    )


def _known_token(sequence: Sequence) -> int:
    if sequence.in_flight:
        return _NO_TOKEN
    return int(sequence.tokens(sequence.num_tokens - 1, sequence.num_tokens)[0])


def _chunk(sequence: Sequence, row: int, count: int) -> Chunk:
    start = sequence.num_computed
    scored = 0
    if sequence.wants_prompt_logprobs:
        scored = max(min(count, sequence.num_prompt - 1 - start), 0)
    return Chunk(
        row=row,
        start=start,
        token_ids=sequence.tokens(start, start + count).copy(),
        is_last=start + count == sequence.num_expected,
        num_scored=scored,
    )


def _wants_logprobs(sequence: Sequence) -> bool:
    return sequence.request.sampling.logprobs is not None


def _banned(sequence: Sequence) -> list[int]:
    """Ids that must not be chosen before min_tokens."""
    sampling = sequence.request.sampling
    if sequence.num_expected - sequence.num_prompt >= sampling.min_tokens:
        return []
    eos = () if sampling.ignore_eos else sequence.request.eos_ids
    return sorted({*eos, *sampling.stop_token_ids})


def _num_pairs(sequence: Sequence) -> int:
    sampling = sequence.request.sampling
    if sequence.counts is None and not sampling.logit_bias and not sampling.min_tokens:
        return 0
    counted = sequence.counts.num if sequence.counts is not None else 0
    return counted + len(sampling.logit_bias) + len(_banned(sequence))


def _pairs(sequence: Sequence, row: int) -> Pairs | None:
    if _num_pairs(sequence) == 0:
        return None
    counts = sequence.counts
    ids = [counts.ids] if counts is not None else []
    values = [counts.counts] if counts is not None else []
    biases = [np.zeros(counts.num, np.float32)] if counts is not None else []
    bias = sequence.request.sampling.logit_bias
    banned = _banned(sequence)
    extra = np.array([*bias.keys(), *banned], np.int32)
    ids.append(extra)
    values.append(np.full(len(extra), -1, np.int32))
    biases.append(np.array([*bias.values(), *([-np.inf] * len(banned))], np.float32))
    return Pairs(row, np.concatenate(ids), np.concatenate(values), np.concatenate(biases))
