"""From a scheduler's plan to the packed vector, and from the step's output back.

The only place that knows both the plan and the packed layout. numpy alone.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np

from xjax.config import SchedulerConfig
from xjax.engine.step import output_fields
from xjax.scheduler import Plan, ScoreArrays, StepResult
from xjax.scheduler.chunks import choose_prefill
from xjax.state.batch import BatchShape, Packed
from xjax.state.recurrent import zero_slot

__all__ = ["Packer", "first_shapes", "largest_shapes", "pack", "shape_of", "shapes_of", "unpack_result"]


def shape_of(plan: Plan, config: SchedulerConfig) -> BatchShape:
    """The shape that a plan asks for."""
    shapes = config.shapes
    prefill_id = None if plan.prefill is None else shapes.prefill.index(plan.prefill)
    shape = _shape(config, plan.num_rows, prefill_id, full=plan.full)
    return shape if plan.pool_mean is None else replace(shape, pooled_dim=config.embed_dim)


def shapes_of(config: SchedulerConfig) -> list[BatchShape]:
    """Every shape that a scheduler of this configuration can ask for, the first needed first."""
    shapes = config.shapes
    found = []
    for full in (False, True):
        found += [_shape(config, shapes.decode_rows[-1], i, full=full) for i in range(len(shapes.prefill))]
        found += [_shape(config, rows, None, full=full) for rows in shapes.decode_rows]
    return found


def largest_shapes(config: SchedulerConfig) -> list[BatchShape]:
    """The mixed and decode shapes that every step fits into, plain ones first, then full ones."""
    shapes = config.shapes
    last = len(shapes.prefill) - 1
    return [
        _shape(config, shapes.decode_rows[-1], prefill_id, full=full)
        for full in (False, True)
        for prefill_id in (last, None)
    ]


def first_shapes(
    config: SchedulerConfig, lengths: Sequence[int], samples: int, *, full: bool, is_pooled: bool = False
) -> list[BatchShape]:
    """The mixed and the decode shape that prompts of these lengths will ask for first.

    is_pooled   whether hidden states are asked for; then nothing is decoded
    """
    shapes = config.shapes
    prefill_id = choose_prefill(lengths, shapes.prefill, shapes.prefill[-1][0])
    rows = next((size for size in shapes.decode_rows if size >= samples), shapes.decode_rows[-1])
    found = [
        _shape(config, shapes.decode_rows[-1], prefill_id, full=full),
        _shape(config, rows, None, full=full),
    ]
    rest = lengths[0] % shapes.prefill[prefill_id][0]
    if len(lengths) == 1 and rest and lengths[0] > shapes.prefill[prefill_id][0]:
        last = choose_prefill([rest], shapes.prefill, shapes.prefill[-1][0])
        found.append(_shape(config, shapes.decode_rows[-1], last, full=full))
    if is_pooled:
        found = [replace(shape, pooled_dim=config.embed_dim) for shape in found if shape.num_prefill]
    return found


def _shape(config: SchedulerConfig, rows: int, prefill_id: int | None, *, full: bool) -> BatchShape:
    shapes = config.shapes
    tokens, tile = shapes.prefill[prefill_id] if prefill_id is not None else (0, 1)
    scored = shapes.num_scored[prefill_id] if prefill_id is not None and full else 0
    # A lone sequence never decodes beside a prefill, so its mixed steps have no decode region.
    decode = 0 if prefill_id is not None and config.max_num_seqs == 1 else rows
    return BatchShape(
        num_rows=rows,
        num_decode=decode,
        num_prefill=tokens,
        tile=tile,
        num_groups=len(config.num_pages),
        max_pages=-(-config.max_model_len // config.page_size),
        num_sampled=rows + scored,
        trash_row=config.max_num_seqs,
        full=full,
        num_pairs=shapes.num_pairs if full else 0,
        has_recurrent=config.has_recurrent,
    )


class Packer:
    """Packs one plan after the other; where rows go on as they were, only what moved is written anew.

    A vector may be written again when nobody but the packer refers to it: JAX holds what a step that
    has not run yet reads.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._shapes: dict[tuple[int, tuple[int, int] | None, bool, bool], BatchShape] = {}
        self._columns: object = None
        self._made: list[tuple[Packed, int]] = []  # of the same rows, with the references of an idle one

    def shape_of(self, plan: Plan) -> BatchShape:
        """The shape that a plan asks for; see the function of that name."""
        key = (plan.num_rows, plan.prefill, plan.full, plan.pool_mean is None)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = shape_of(plan, self._config)
        return shape

    def __call__(self, plan: Plan, shape: BatchShape) -> np.ndarray:
        """Fill the vector of a shape; see `pack`."""
        page_size = self._config.page_size
        if self._made and plan.columns is self._columns and self._made[0][0].shape == shape:
            packed = self._idle()
            rows = len(plan.sequences)
            packed.table[:, :rows] = plan.tables
            _pack_positions(packed, plan, page_size)
            if shape.full:
                packed.pending[:rows] = plan.pending
            _pack_recurrent(packed, plan)
            return packed.vector
        packed = _packed(plan, shape, page_size)
        self._columns, self._made = plan.columns, []
        self._keep(packed)
        return packed.vector

    def _idle(self) -> Packed:
        """A packed step of the same rows to write into."""
        for packed, references in self._made:
            if sys.getrefcount(packed.vector) == references:
                return packed
        packed = Packed(self._made[0][0].shape, self._made[0][0].vector)
        self._keep(packed)
        return packed

    def _keep(self, packed: Packed) -> None:
        for name in ("table", "token_id", "position", "write", "kv_length", "sample_position", "pending",
                     "recurrent_read", "recurrent_write"):  # fmt: skip
            getattr(packed, name)  # each view refers to the vector, so they are made before it is counted
        self._made.append((packed, sys.getrefcount(packed.vector)))


def pack(plan: Plan, shape: BatchShape, *, page_size: int) -> np.ndarray:
    """Fill the vector of a shape, which may be larger than the plan's own.

    returns  [packed_length(shape)] int32, fresh
    """
    return _packed(plan, shape, page_size).vector


def _packed(plan: Plan, shape: BatchShape, page_size: int) -> Packed:
    packed = Packed(shape)
    rows = len(plan.sequences)
    packed.slot[:rows] = plan.slots
    packed.table[:, :rows] = plan.tables
    _pack_decodes(packed, plan, page_size)
    _pack_chunks(packed, plan, page_size)
    _pack_sampled(packed, plan)
    _pack_recurrent(packed, plan)
    if plan.pool_mean is not None:
        packed.pool_mean[:rows] = plan.pool_mean
    return packed


def _pack_recurrent(packed: Packed, plan: Plan) -> None:
    if packed.shape.has_recurrent and plan.recurrent_fresh is not None:
        rows, zero = len(plan.sequences), zero_slot(packed.shape.trash_row)
        packed.recurrent_read[:rows] = np.where(plan.recurrent_fresh, zero, plan.slots)
        packed.recurrent_write[:rows] = plan.slots


def _pack_decodes(packed: Packed, plan: Plan, page_size: int) -> None:
    count = plan.num_decode
    if not count:
        return
    _pack_positions(packed, plan, page_size)
    rows = np.arange(count, dtype=np.int32)
    packed.row_of[:count] = rows
    packed.query_start[:count] = rows
    packed.query_length[:count] = 1
    packed.sample_token[:count] = rows


def _pack_positions(packed: Packed, plan: Plan, page_size: int) -> None:
    """What moves from one step of decoding rows to the next."""
    positions, count = plan.positions, plan.num_decode
    page, inside = np.divmod(positions, page_size)
    packed.token_id[:count] = plan.token_ids
    packed.position[:count] = positions
    pages = plan.tables[:, np.arange(count), page]
    packed.write[:, :count] = pages * page_size + inside
    packed.kv_length[:count] = packed.sample_position[:count] = positions + 1


def _pack_chunks(packed: Packed, plan: Plan, page_size: int) -> None:
    shape = packed.shape
    at, place = shape.num_decode, shape.num_rows
    for chunk in plan.chunks:
        stop = at + chunk.length
        positions = np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int32)
        packed.token_id[at:stop] = chunk.token_ids
        packed.position[at:stop] = positions
        tiles = -(-chunk.length // shape.tile)
        packed.row_of[at : at + tiles * shape.tile] = chunk.row
        pages = plan.tables[:, chunk.row][:, positions // page_size]
        packed.write[:, at:stop] = pages * page_size + positions % page_size
        packed.query_start[chunk.row] = at
        packed.query_length[chunk.row] = chunk.length
        packed.kv_length[chunk.row] = chunk.start + chunk.length
        packed.sample_token[chunk.row] = stop - 1
        packed.sample_position[chunk.row] = chunk.start + chunk.length
        if chunk.num_scored:
            end = place + chunk.num_scored
            packed.sample_token[place:end] = np.arange(at, at + chunk.num_scored, dtype=np.int32)
            packed.sample_position[place:end] = positions[: chunk.num_scored] + 1
            packed.want_logprobs[place:end] = 1
            place = end
        at += tiles * shape.tile
    if len(plan.scored_targets):
        first = shape.num_rows
        packed.target[first : first + len(plan.scored_targets)] = plan.scored_targets


_PLAIN = ("seed", "sample_id", "temperature", "top_k", "top_p", "min_p")
_FULL = ("repetition_penalty", "frequency_penalty", "presence_penalty", "want_logprobs")


def _pack_sampled(packed: Packed, plan: Plan) -> None:
    shape, rows = packed.shape, len(plan.sequences)
    packed.sample_slot[:rows] = np.where(plan.samples, plan.slots, shape.trash_row)
    for name in _PLAIN + (_FULL if shape.full else ()):
        getattr(packed, name)[:rows] = plan.columns[name]
    # A chunk that does not end its prompt needs no token: greedy costs the least.
    packed.temperature[:rows] *= plan.samples
    if not shape.full:
        return
    packed.pending[:rows] = plan.pending
    at = 0
    for pairs in plan.pairs:
        end = at + len(pairs.ids)
        packed.pair_row[at:end] = pairs.row
        packed.pair_id[at:end] = pairs.ids
        packed.pair_count[at:end] = pairs.counts
        packed.pair_bias[at:end] = pairs.biases
        at = end


@lru_cache(maxsize=256)
def _output_places(shape: BatchShape, vocab_size: int) -> dict[str, tuple[int, int, type, tuple[int, ...]]]:
    """Start, stop, numpy type and dims of each part of the output vector by its name."""
    places, at = {}, 0
    for name, kind, dims in output_fields(shape, vocab_size):
        size = prod(dims)
        places[name] = (at, at + size, kind, dims)
        at += size
    return places


def unpack_result(output: np.ndarray, shape: BatchShape, plan: Plan, *, vocab_size: int) -> StepResult:
    """Split what came back from the device; scored positions move to where the plan expects them.

    output   [output length of shape] int32
    """
    places = _output_places(shape, vocab_size)
    keep = None
    if shape.num_rows != plan.num_rows:
        keep = np.r_[0 : plan.num_rows, shape.num_rows : shape.num_sampled]

    def part(name: str) -> np.ndarray:
        start, stop, kind, dims = places[name]
        value = output[start:stop].view(kind).reshape(dims)
        return value if keep is None else value[keep]

    def scores() -> ScoreArrays:
        return ScoreArrays(part("logprob"), part("rank"), part("top_ids"), part("top_logprobs"))

    pooled = None
    if plan.pool_mean is not None:
        start, stop, kind, dims = places["pooled"]
        pooled = output[start:stop].view(kind).reshape(dims)
    return StepResult(part("token"), part("flags"), scores if shape.full else None, pooled)
