"""What the flags of `xjax bench offline` ask for."""

import pytest

from xjax.errors import RequestError
from xjax_server.bench.commands.offline import plan_of

FLAGS = {
    "rows": "8,1", "prefill": "2048,512", "context": 256, "threads": 2, "repeats": 3, "starts": 0,
    "kernels": "numba,xla,numba", "peers": "transformers,llama-bench=/a/b",
}  # fmt: skip


def test_flags_become_a_plan():
    plan = plan_of(**FLAGS)
    assert (plan.rows, plan.prefill, plan.context) == ((1, 8), (512, 2048), 256)
    assert plan.kernels == ("numba", "xla")
    assert plan.peers == {"transformers": "", "llama-bench": "/a/b"}
    assert plan_of(**FLAGS | {"kernels": ""}).kernels == ("auto",)


@pytest.mark.parametrize(
    "wrong", [{"kernels": "cuda"}, {"rows": "0"}, {"prefill": "many"}, {"peers": "llama.cpp"}]
)
def test_wrong_flags_are_refused(wrong):
    with pytest.raises(RequestError):
        plan_of(**FLAGS | wrong)
