"""The server's own cost is measured on both servers, and what is asked for is what is counted."""

from xjax_server.bench.serving.overhead import KINDS, OverheadPlan, measure_overhead


def test_both_servers_are_measured_at_each_number_of_streams():
    plan = OverheadPlan(streams=(1, 3), output_len=3, seconds=0.005, num_short=2, repeats=2)
    rows = measure_overhead(plan)
    assert [(row["streams"], row["server"]) for row in rows] == [(n, k) for n in (1, 3) for k in KINDS]
    for row in rows:
        for name in ("processor_seconds_per_token", "requests_per_second", "processor_seconds_per_request"):
            assert row[name]["count"] == 2 and row[name]["low"] > 0
        assert row["added_seconds_per_token"]["median"] < 1
