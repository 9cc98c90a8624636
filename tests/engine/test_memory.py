"""The memory plan against numbers worked out by hand, and its readers against made-up machines."""

import pytest

from tests.engine.tiny import tiny_gemma
from xjax.config import EngineOptions, PagedLayer, RecurrentLayer, SchedulerConfig, StepShapes
from xjax.engine import memory
from xjax.engine.build import plan_engine, with_defaults
from xjax.engine.memory import PROGRAM_BYTES, RUNTIME_BYTES, host_available, plan_memory
from xjax.errors import LoadError
from xjax.scheduler import Scheduler

GB, MB = 10**9, 10**6
FULL = (PagedLayer(2, 64),) * 3  # a page of 16 tokens: 3 layers x k and v x 2 x 64 x 16 x 4 bytes
PAGE = 3 * 2 * 2 * 64 * 16 * 4
FIXED = RUNTIME_BYTES + 4 * PROGRAM_BYTES + 100 * MB + 50 * MB


def plan(spec=FULL, **changes):
    values = {
        "available": 4 * GB, "weights": 100 * MB, "activations": 50 * MB, "num_programs": 4,
        "max_model_len": 2048, "max_num_seqs": 8, "page_size": 16, "chunk": 512, "kv_itemsize": 4,
        "kv_fraction": 0.5,
    }  # fmt: skip
    return plan_memory(spec, **(values | changes))


def test_no_more_than_all_sequences_need():
    found = plan()
    assert found.page_bytes == (PAGE,)
    assert found.num_pages == (8 * 128 + 1,)
    assert (found.longest, found.total_tokens) == (2048, 8 * 2048)
    assert found.pages_total == (8 * 128 + 1) * PAGE


def test_a_fraction_of_what_is_left():
    found = plan(available=FIXED + 10 * MB)
    pages = found.num_pages[0] - 1
    assert 7 / 8 * int(5 * MB / PAGE) <= pages <= int(5 * MB / PAGE)
    assert found.longest == pages * 16 < 2048


def test_a_little_less_memory_makes_the_same_pages():
    counts = [plan(available=FIXED + (500 + i) * MB // 50).num_pages[0] for i in range(100)]
    assert counts == sorted(counts) and 2 <= len(set(counts)) <= 4


def test_recurrent_state_and_programs_count():
    found = plan(available=FIXED + 60 * MB, recurrent=20 * MB)
    assert 7 / 8 * int(20 * MB / PAGE) <= found.num_pages[0] - 1 <= int(20 * MB / PAGE)
    assert found.recurrent == 20 * MB and found.programs == RUNTIME_BYTES + 4 * PROGRAM_BYTES


def test_states_on_the_host_are_as_many_times_the_rows_and_count_where_memory_is_one():
    changes = {"available": FIXED + 60 * MB, "recurrent": 10 * MB, "state_bytes": MB}
    for fold, count in ((0.0, 0), (0.5, 4), (0.51, 5), (2.0, 16)):
        apart = plan(**changes, host_fold=fold)
        assert (apart.host_states, apart.state_bytes) == (count, MB)
        assert apart.num_pages == plan(**changes).num_pages
        shared = plan(**changes, host_fold=fold, is_shared=True)
        less = plan(
            **(changes | {"recurrent": (10 + count) * MB, "state_bytes": 0}), host_fold=fold, is_shared=True
        )
        assert shared.num_pages == less.num_pages and shared.host_states == count
    assert ("recurrent state", "10 MB, 16 MB on the host") in shared.table()
    assert (
        plan((RecurrentLayer(2, 8, 8),), state_bytes=MB, host_fold=1.0).host_states == 0
    )  # none is preempted


def test_num_pages_overrides_below_one_longest_sequence():
    found = plan(num_pages=11)
    assert found.num_pages == (11,) and found.longest == 160 and found.total_tokens == 160
    assert ("longest request", "160 tokens") in found.table()


def test_groups_are_split_by_what_a_longest_sequence_needs():
    spec = (PagedLayer(2, 64, 256),) * 5 + (PagedLayer(2, 64),)
    found = plan(spec, available=FIXED + 200 * MB)
    full, window = (count - 1 for count in found.num_pages)
    # 128 pages of the full group to ceil((256 + 512) / 16) + 1 = 49 of the window group.
    assert abs(full / window - 128 / 49) < 0.1
    assert found.page_bytes == (PAGE // 3, PAGE // 3 * 5)
    assert found.pages_total <= 100 * MB + sum(found.page_bytes)


@pytest.mark.parametrize("num_pages", [3, 6, 9, 20, 40])
def test_the_longest_request_is_the_schedulers(num_pages):
    found = plan(
        spec=(PagedLayer(1, 8), PagedLayer(1, 8, 40)), num_pages=num_pages, chunk=64, max_model_len=512
    )
    shapes = StepShapes(decode_rows=(1,), prefill=((64, 32),), num_scored=(16,), num_pairs=64)
    config = SchedulerConfig(
        max_num_seqs=1,
        max_model_len=512,
        page_size=16,
        num_pages=found.num_pages,
        windows=(None, 40),
        shapes=shapes,
    )
    assert found.longest == Scheduler(config).longest


def test_a_model_without_pages():
    found = plan((RecurrentLayer(2, 8, 8),) * 2, recurrent=MB)
    assert found.num_pages == () and found.longest == 2048


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"available": 600 * MB}, "600 MB available, but weights take 100 MB, activations 50 MB"),
        ({"num_pages": 10**6}, "--num-pages asks for 49,152 MB; free memory, lower --num-pages or"),
        (
            {"num_pages": 10**6, "host_fold": 1.5, "is_shared": True},
            r"asks for 122,880 MB with those of the host \(--cpu-mem-fold 1.5\); free memory, lower "
            "--cpu-mem-fold, --num-pages or",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_numbers(changes, text):
    with pytest.raises(LoadError, match=text):
        plan(**changes)


@pytest.mark.parametrize("longest", [37, 100, 157, 2048])
def test_pages_that_are_asked_for_are_as_many(longest):
    for spec in (FULL, (PagedLayer(2, 64, window=12),)):
        found = [plan(spec, num_pages=count, max_model_len=longest).num_pages for count in range(2, 200)]
        assert found == [(count,) for count in range(2, 200)]


@pytest.mark.device
def test_a_context_above_the_models_is_refused():
    model = tiny_gemma()
    device = memory_device()
    options = with_defaults(EngineOptions(max_model_len=100_000), device)
    with pytest.raises(LoadError, match="100000 is above the model's context, 512"):
        plan_engine(model, options, device=device)


def memory_device():
    class Device:
        platform = "cpu"

    return Device()


def test_an_accelerator_that_does_not_report_its_memory():
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return None

    with pytest.raises(LoadError, match="--num-pages"):
        memory.available_bytes(Device())


def test_what_a_notebook_already_uses_is_left_alone():
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 10 * GB, "bytes_in_use": 4 * GB}

    assert memory.available_bytes(Device()) == int(0.92 * 6 * GB)


# ---- control groups ----------------------------------------------------------------------


def machine(root, **files):
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8000000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_limits(tmp_path):
    assert host_available(machine(tmp_path)) == 8_000_000 * 1024
    assert host_available(tmp_path / "not linux") == 8 << 30


def test_a_version_2_container(tmp_path):
    root = machine(
        tmp_path,
        **{
            "sys/fs/cgroup/memory.max": "2000000000\n",
            "sys/fs/cgroup/memory.current": "900000000\n",
            "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 400000000\n",
        },
    )
    assert host_available(root) == 1_500_000_000


def test_a_version_1_container(tmp_path):
    root = machine(
        tmp_path,
        **{
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000000\n",
        },
    )
    assert host_available(root) == 2_000_000_000


@pytest.mark.parametrize("line", ["0::/system.slice/job.scope", "4:memory:/system.slice/job.scope"])
def test_the_tightest_limit_above_the_process_counts(tmp_path, line):
    base = "sys/fs/cgroup" + ("/memory" if "memory" in line else "")
    limit, usage = ("memory.max", "memory.current")
    if "memory" in line:
        limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    root = machine(
        tmp_path,
        **{
            "proc/self/cgroup": f"7:cpu:/other\n{line}\n",
            f"{base}/system.slice/{limit}": "1000000000",
            f"{base}/system.slice/{usage}": "400000000",
            f"{base}/system.slice/job.scope/{limit}": "max",
            f"{base}/system.slice/job.scope/{usage}": "1",
        },
    )
    assert host_available(root) == 600_000_000


def test_window_groups_carry_what_few_full_pages_hold():
    spec = (PagedLayer(1, 64, 512),) * 5 + (PagedLayer(1, 64),)
    found = plan(spec, num_pages=65, max_model_len=32768, chunk=512)
    assert found.num_pages[0] == 65 and found.longest == 64 * 16
