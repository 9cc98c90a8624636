"""Stand-ins that the scheduler, engine and server are tested with.

`FakeModel` is a model whose next token can be computed by hand. Its cache entry of a token is a
hash of the token and of the entries that the token can see, in each page group through that
group's window, as keys and values of deep layers are; so one wrong, stale or missing entry read
anywhere changes every later token. With `has_state` it hashes a state of the sequence too, which each
token changes, as recurrent layers do. `FakeDevice` runs `Plan`s with it on numpy pages; `FakeLoop`
is the engine's loop around a scheduler.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from xjax.config import SchedulerConfig
from xjax.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from xjax.scheduler import Moves, Plan, Scheduler, ScoreArrays, StepResult, Transfer

POISON = 0xDEADBEEF
COPIES = 10**6
FLOAT_COLUMNS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip


def _mix(*parts: bytes) -> int:
    """A 32-bit hash; not a CRC, which forgets what came before a CRC inside its data."""
    return int.from_bytes(hashlib.blake2b(b"|".join(parts), digest_size=4).digest(), "little")


@dataclass(frozen=True)
class FakeModel:
    """The rule of the fake; `nan_token` as the last input can make the logits not finite."""

    windows: tuple[int | None, ...]
    vocab: int = 61
    nan_token: int = 60
    has_state: bool = False

    def is_nan(self, token: int, position: int) -> bool:
        """Whether the logits of this token at this position are not finite."""
        return token == self.nan_token and position % 4 == 0

    def entry(self, token: int, position: int, seen: list[np.ndarray], state: int = 0) -> int:
        """Cache entry of a token; `seen` by group are the entries before it that it sees, `state` its own."""
        return _mix(struct.pack("<iiI", token, position, state), *(entries.tobytes() for entries in seen))

    def next_state(self, state: int, token: int) -> int:
        """The state after a token; that of nothing is 0."""
        return _mix(struct.pack("<Ii", state, token)) if self.has_state else 0

    def seen(self, entries: np.ndarray, group: int, position: int) -> np.ndarray:
        """Of the entries of a sequence in a group, those before `position` that it sees."""
        window = self.windows[group]
        return entries[0 if window is None else max(position - window + 1, 0) : position]

    def choose(
        self,
        entry: int,
        position: int,
        *,
        columns: tuple[float, ...],
        counts: dict[int, int] | None,
        biases: dict[int, float],
    ) -> int:
        """The next token; `counts` are those that penalties read, -inf biases ban."""
        finite = sorted((i, bias) for i, bias in biases.items() if bias != -np.inf)
        read = repr((counts and sorted(counts.items()), finite)).encode()
        token = _mix(struct.pack(f"<Ii{len(columns)}d", entry, position, *columns), read) % self.vocab
        while biases.get(token) == -np.inf:
            token = (token + 1) % self.vocab
        return token

    def logprobs(self, entry: int, target: int, count: int) -> TokenLogprobs:
        """Log-probabilities of `target` after the token with this entry."""
        value = _mix(struct.pack("<Ii", entry, target))
        top = tuple(((value + i) % self.vocab, -float(i)) for i in range(count))
        return TokenLogprobs(-(value % 4096) / 64, value % self.vocab + 1, top)


@dataclass
class Answer:
    """What one sample should come to."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def _columns(sampling: SamplingParams, sample_id: int) -> tuple[float, ...]:
    seed = (sampling.seed or 0) % 2**64
    floats = [float(np.float32(getattr(sampling, name))) for name in FLOAT_COLUMNS]
    return (seed % 2**32, seed >> 32, sample_id, max(sampling.top_k, 0), *floats)


def answer_alone(model: FakeModel, request: Request, sample_id: int, longest: int) -> Answer:
    """Work out a sample by hand: no pages, no batch, no scheduler."""
    sampling, tokens, entries, answer = request.sampling, list(request.prompt_ids), [], Answer()
    num_prompt, state = len(tokens), 0
    room = longest - num_prompt
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    eos = set() if sampling.ignore_eos else set(request.eos_ids)
    stops = eos | set(sampling.stop_token_ids)
    has_counts = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (
        1,
        0,
        0,
    )
    while answer.reason is None:
        while len(entries) < len(tokens):
            position, array = len(entries), np.array(entries, np.uint32)
            seen = [model.seen(array, group, position) for group in range(len(model.windows))]
            state = model.next_state(state, tokens[position])
            entries.append(model.entry(tokens[position], position, seen, state))
        if model.is_nan(tokens[-1], len(tokens) - 1):
            answer.reason = FinishReason.ERROR
            break
        output = tokens[num_prompt:]
        counts = {token: output.count(token) for token in tokens} if has_counts else None
        biases = dict(sampling.logit_bias)
        if len(output) < sampling.min_tokens:
            biases.update(dict.fromkeys(stops, -np.inf))
        token = model.choose(
            entries[-1], len(tokens), columns=_columns(sampling, sample_id), counts=counts, biases=biases
        )
        if sampling.logprobs is not None:
            answer.logprobs.append(model.logprobs(entries[-1], token, sampling.logprobs))
        tokens.append(token)
        answer.token_ids.append(token)
        if token in stops:
            answer.reason = FinishReason.STOP
        elif len(answer.token_ids) == max_tokens:
            answer.reason = FinishReason.LENGTH
    if sampling.prompt_logprobs is not None and sample_id == 0:
        scored = [
            model.logprobs(entries[i - 1], tokens[i], sampling.prompt_logprobs) for i in range(1, num_prompt)
        ]
        answer.prompt_logprobs = [None, *scored]
    return answer


class DeviceFailure(Exception):
    """The fake device could not run a step."""


class FakeDevice:
    """Runs plans in the order given, on pages of cache entries, and as late as it may.

    A step is computed when its result is read, so a plan that still shares memory with the
    scheduler shows. What is lost or spoiled happens in the same order as the steps.
    """

    def __init__(self, config: SchedulerConfig, model: FakeModel) -> None:
        self.config, self.model = config, model
        self.pages: list[np.ndarray] = []
        self.hosts: list[np.ndarray] = []
        self.last_token = np.empty(0, np.int64)
        self.states, self.host_states = np.empty(0, np.uint32), np.empty(0, np.uint32)
        self._queue: list[Callable[[], None]] = []
        self.reset()

    def reset(self) -> None:
        """Lose all contents and all steps not computed yet."""
        self._queue = []
        size = self.config.page_size
        self.pages = [np.full((count, size), POISON, np.uint32) for count in self.config.num_pages]
        if not self.hosts:
            counts = self.config.host_pages or (0,) * len(self.pages)
            self.hosts = [np.full((count + 1, size), POISON, np.uint32) for count in counts]
            self.host_states = np.full(self.config.host_states + 1, POISON, np.uint32)
        self.states = np.full(self.config.max_num_seqs, POISON, np.uint32)
        self.last_token = np.full(self.config.max_num_seqs, -1)

    def poison(self, group: int, pages: list[int]) -> None:
        """Spoil pages that nobody may read any more."""
        self._queue.append(lambda: self.pages[group].__setitem__(pages, POISON))

    def poison_slots(self, group: int, slots: list[int]) -> None:
        """Spoil host slots that nobody may read any more, not even a load that has not run."""
        self.hosts[group][slots] = POISON

    def poison_states(self, rows: list[int], slots: list[int]) -> None:
        """Spoil the states of rows that nobody has, and host slots for states likewise."""
        self._queue.append(lambda: self.states.__setitem__(rows, POISON))
        self.host_states[slots] = POISON

    def spoil(self, transfer: Transfer) -> bool:
        """Leave in the slots of a save what one that fails may leave there."""
        for group, slots in enumerate(transfer.slots):
            self.poison_slots(group, slots.tolist())
        self.host_states[transfer.states] = POISON
        return False

    def save(self, transfer: Transfer) -> Callable[[], bool]:
        """Put a save into the queue; call what comes back to land its pages, if they can be had."""
        read: list[np.ndarray] = []
        is_done = self._enqueue(lambda: read.extend([
            *(pages[ids] for pages, ids in zip(self.pages, transfer.pages, strict=True)),
            self.states[transfer.rows],
        ]))  # fmt: skip

        def land() -> bool:
            if not is_done():
                return False
            for host, slots, values in zip(self.hosts, transfer.slots, read[:-1], strict=True):
                host[slots] = values
            self.host_states[transfer.states] = read[-1]
            return True

        return land

    def load(self, transfer: Transfer) -> Callable[[], bool]:
        """Put a load into the queue; call what comes back for whether it has been done."""

        def run() -> None:
            for pages, host, ids, slots in zip(
                self.pages, self.hosts, transfer.pages, transfer.slots, strict=True
            ):
                pages[ids] = host[slots]
            self.states[transfer.rows] = self.host_states[transfer.states]

        return self._enqueue(run)

    def copy(self, moves: Moves) -> None:
        """Put the copies of pages on the device into the queue."""

        def run() -> None:
            for pages, sources, targets in zip(self.pages, moves.sources, moves.targets, strict=True):
                assert len(set(targets.tolist())) == len(targets), "a page is copied to twice"
                pages[targets] = pages[sources]

        self._queue.append(run)

    def _enqueue(self, work: Callable[[], None]) -> Callable[[], bool]:
        queue, done = self._queue, list[bool]()
        queue.append(lambda: (work(), done.append(True)) and None)

        def is_done() -> bool:
            while queue and not done:
                if queue is not self._queue:
                    return False  # lost with everything else on the device
                queue.pop(0)()
            return bool(done)

        return is_done

    def dispatch(self, plan: Plan) -> Callable[[], StepResult]:
        """Put a step into the queue; call what comes back to read its result."""
        results: list[StepResult] = []
        self._queue.append(lambda: results.append(self._run(plan)))

        def read() -> StepResult:
            while not results:
                self._queue.pop(0)()
            return results[0]

        return read

    def _run(self, plan: Plan) -> StepResult:
        """Compute a step and feed its tokens back."""
        self._check_shape(plan)
        inputs: list[tuple[int, list[int]]] = []  # start and tokens by row
        for row in range(plan.num_decode):
            known = int(plan.token_ids[row])
            token = int(self.last_token[plan.slots[row]]) if known < 0 else known
            inputs.append((int(plan.positions[row]), [token]))
        inputs += [(chunk.start, chunk.token_ids.tolist()) for chunk in plan.chunks]
        histories = [self._history(plan, row) for row in range(len(inputs))]  # reads before writes
        for row, (start, tokens) in enumerate(inputs):
            assert plan.recurrent_fresh is not None
            slot = plan.slots[row]
            state = 0 if plan.recurrent_fresh[row] else int(self.states[slot])
            for position, token in enumerate(tokens, start):
                state = self.model.next_state(state, token)
                self._compute(plan, row, histories[row], position, token, state)
            self.states[slot] = state
        return self._sample(plan, inputs, histories)

    def _check_shape(self, plan: Plan) -> None:
        shapes, rows = self.config.shapes, len(plan.sequences)
        assert 0 < rows == plan.num_decode + len(plan.chunks) <= plan.num_rows
        assert plan.num_rows in shapes.decode_rows
        assert len(set(plan.slots.tolist())) == rows
        assert (plan.prefill is None) == (not plan.chunks)
        if plan.prefill is not None:
            tokens, tile = plan.prefill
            assert sum(-(-chunk.length // tile) for chunk in plan.chunks) <= tokens // tile
            scored = sum(chunk.num_scored for chunk in plan.chunks)
            assert scored == len(plan.scored_targets) <= shapes.num_scored[shapes.prefill.index(plan.prefill)]
        assert sum(len(pairs.ids) for pairs in plan.pairs) <= shapes.num_pairs
        for chunk in plan.chunks:
            assert plan.recurrent_fresh is not None and plan.recurrent_fresh[chunk.row] == (chunk.start == 0)

    def _history(self, plan: Plan, row: int) -> list[np.ndarray]:
        return [pages[plan.tables[group, row]].reshape(-1) for group, pages in enumerate(self.pages)]

    def _compute(
        self, plan: Plan, row: int, history: list[np.ndarray], position: int, token: int, state: int
    ) -> None:
        seen = [self.model.seen(entries, group, position) for group, entries in enumerate(history)]
        entry = self.model.entry(token, position, seen, state)
        page, offset = divmod(position, self.config.page_size)
        for group, entries in enumerate(history):
            entries[position] = entry
            target = plan.tables[group, row, page]
            if target:
                self.pages[group][target, offset] = entry

    def _sample(
        self, plan: Plan, inputs: list[tuple[int, list[int]]], histories: list[list[np.ndarray]]
    ) -> StepResult:
        num_sampled = plan.num_rows + len(plan.scored_targets)
        token, flags = np.full(num_sampled, -9, np.int32), np.zeros(num_sampled, np.int32)
        targets: list[tuple[int, int]] = [(0, 0)] * num_sampled  # entry and token
        pairs_by_row = {pairs.row: pairs for pairs in plan.pairs}
        for row, (start, tokens) in enumerate(inputs):
            if not plan.samples[row]:
                continue
            last = start + len(tokens) - 1
            entry = int(histories[row][0][last])
            slot = plan.slots[row]
            counts: dict[int, int] = {}
            biases: dict[int, float] = {}
            if row in pairs_by_row:
                pairs = pairs_by_row[row]
                lines = list(
                    zip(pairs.ids.tolist(), pairs.counts.tolist(), pairs.biases.tolist(), strict=True)
                )
                counts = {i: count for i, count, _ in lines if count >= 0}
                biases = {i: bias for i, count, bias in lines if count < 0}
                assert len(counts) + len(biases) == len(lines), "an id is in the pairs twice"
                if counts and plan.pending[row]:
                    pending = int(self.last_token[slot])
                    counts[pending] = counts.get(pending, 0) + 1
            names = ("sample_id", "top_k", *FLOAT_COLUMNS)
            columns = (
                *plan.columns["seed"][row].tolist(),
                *(float(plan.columns[name][row]) for name in names),
            )
            chosen = self.model.choose(entry, last + 1, columns=columns, counts=counts or None, biases=biases)
            token[row], targets[row] = chosen, (entry, chosen)
            flags[row] = int(self.model.is_nan(tokens[-1], last))
            self.last_token[slot] = chosen
        place = plan.num_rows
        for chunk in plan.chunks:
            for i in range(chunk.num_scored):
                entry = int(histories[chunk.row][0][chunk.start + i])
                targets[place] = (entry, int(plan.scored_targets[place - plan.num_rows]))
                place += 1
        return self._result(plan, token, flags, targets)

    def _result(
        self, plan: Plan, token: np.ndarray, flags: np.ndarray, targets: list[tuple[int, int]]
    ) -> StepResult:
        if not plan.full:
            return StepResult(token, flags)
        found = [self.model.logprobs(entry, target, 20) for entry, target in targets]
        scores = ScoreArrays(
            logprob=np.array([item.logprob for item in found], np.float32),
            rank=np.array([item.rank for item in found], np.int32),
            top_ids=np.array([[i for i, _ in item.top] for item in found], np.int32),
            top_logprobs=np.array([[value for _, value in item.top] for item in found], np.float32),
        )
        return StepResult(token, flags, lambda: scores)


class FakeLoop:
    """The engine's loop: commands, plan, dispatch, and only then the result of the step before.

    now            the fake clock, one second a step
    refused_steps  numbers of dispatches that raise at once
    broken_steps   numbers of dispatches whose results turn out to be lost, with all pages
    broken_moves   serials of saves and loads that fail; those of copies count from `COPIES` on
    move_delay     steps after which the mover reports, by serial
    is_checked     whether the scheduler's own bookkeeping is verified after each step
    """

    def __init__(
        self,
        config: SchedulerConfig,
        model: FakeModel,
        *,
        lookahead: bool = True,
        refused_steps: frozenset[int] = frozenset(),
        broken_steps: frozenset[int] = frozenset(),
        broken_moves: Callable[[int], bool] = lambda serial: False,
        move_delay: Callable[[int], int] = lambda serial: 0,
        is_checked: bool = True,
    ) -> None:
        self._broken_moves, self._move_delay = broken_moves, move_delay
        self._moving: list[tuple[float, Callable[[], None]]] = []
        self.moved_pages = 0
        self.num_moves = self.num_failed_copies = 0
        self.num_forward = 0
        self.scheduler = Scheduler(config)
        self.device = FakeDevice(config, model)
        self.events: list[TokenEvent] = []
        self.on_event: Callable[[TokenEvent], None] = lambda event: None
        self.now = 0.0
        self.num_dispatched = 0
        self._lookahead, self._is_checked = lookahead, is_checked
        self._refused, self._broken = refused_steps, broken_steps
        self._pending: tuple[Plan, Callable[[], StepResult], int] | None = None
        self._life = 0  # of the device's contents; steps of an earlier one are lost
        self._commands: list[Callable[[], list[TokenEvent]]] = []

    def submit(self, request: Request) -> None:
        """Queue a request; raises what the scheduler raises."""
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        """Post an abort."""
        self._commands.append(lambda: self.scheduler.abort(request_id))

    def finish(self, request_id: str, sample_id: int, num_tokens: int) -> None:
        """Post an end that the text decided."""
        self._commands.append(lambda: self.scheduler.finish(request_id, sample_id, num_tokens))

    @property
    def is_idle(self) -> bool:
        """Whether nothing lives and nothing is under way."""
        return not (self.scheduler.has_work or self._pending or self._commands or self._moving)

    def step(self) -> Plan | None:
        """Go round the loop once."""
        self.now += 1
        commands, self._commands = self._commands, []
        for command in commands:
            self._emit(command())
        self._emit(self.scheduler.expire(self.now))
        self._report_moves()
        if not self._lookahead:
            self._settle()
        plan = self.scheduler.plan(self.now)
        moves = self.scheduler.swap.take_moves()
        if moves is not None:
            self._move(moves)
        if plan is not None:
            self.num_forward += plan.num_decode + plan.num_prefill_tokens
        current = self._dispatch(plan) if plan is not None else None
        previous, self._pending = self._pending, current
        self._commit(previous)
        if plan is not None:
            self.scheduler.observe(plan, 0.01)
        if self._is_checked:
            self.scheduler.check()
        self._poison_free_pages()
        return plan

    def _move(self, moves: Moves) -> None:
        for transfer in moves.saves:
            self.moved_pages += transfer.num_pages
            is_done = self.device.save(transfer)
            if self._broken_moves(transfer.serial):
                is_done = partial(self.device.spoil, transfer)
            self._report(transfer, lambda t, done=is_done: self.scheduler.swap.end_save(t.serial, ok=done()))
        self.num_moves += 1
        if moves.num_copies and self._broken_moves(COPIES + self.num_moves):
            self.scheduler.swap.fail_copies()
            self.num_failed_copies += 1
        else:
            self.device.copy(moves)
        for transfer in moves.loads:
            if self._broken_moves(transfer.serial):
                self.scheduler.swap.end_load(transfer.serial, ok=False)
                continue
            self.moved_pages += transfer.num_pages
            is_done = self.device.load(transfer)
            self._report(transfer, lambda t, done=is_done: self.scheduler.swap.end_load(t.serial, ok=done()))

    def _report(self, transfer: Transfer, report: Callable[[Transfer], None]) -> None:
        due = self.now + 1 + self._move_delay(transfer.serial)
        self._moving.append((due, lambda: report(transfer)))

    def _report_moves(self) -> None:
        due = [report for when, report in self._moving if when <= self.now]
        self._moving = [item for item in self._moving if item[0] > self.now]
        for report in due:
            report()

    def _dispatch(self, plan: Plan) -> tuple[Plan, Callable[[], StepResult], int] | None:
        self.num_dispatched += 1
        try:
            if self.num_dispatched in self._refused:
                raise DeviceFailure("refused")
            read = self.device.dispatch(plan)
        except DeviceFailure as error:
            self._emit(self.scheduler.fail(plan, str(error)))
            return None
        return plan, self._lose if self.num_dispatched in self._broken else read, self._life

    def _lose(self) -> StepResult:
        raise DeviceFailure("lost")

    def _settle(self) -> None:
        previous, self._pending = self._pending, None
        self._commit(previous)

    def _commit(self, step: tuple[Plan, Callable[[], StepResult], int] | None) -> None:
        if step is None:
            return
        plan, read, life = step
        try:
            if life != self._life:
                raise DeviceFailure("lost too")
            result = read()
        except DeviceFailure as error:
            self._emit(self.scheduler.fail(plan, str(error)))
            if life == self._life:
                self._life += 1
                self.device.reset()
                self.scheduler.preempt_all()
            return
        self._emit(self.scheduler.commit(plan, result))

    def _emit(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            self.events.append(event)
            self.on_event(event)

    def _poison_free_pages(self) -> None:
        book = self.scheduler._roster.book
        for group, (pool, host) in enumerate(zip(book.pools, book.hosts, strict=True)):
            self.device.poison(group, list(pool._free))
            self.device.poison_slots(group, list(host._free))
        self.device.poison_states(list(self.scheduler._roster.rows._free), list(book.states._free))
