"""Zeros that were given back take no memory, read as zeros, and can be written."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xjax.state.zeros import give_back_zeros

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is given back under Linux only"),
]
SIZE = 256 << 20


PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(arrays):
    """Bytes of arrays that lie in memory, page by page: what else the process does is not counted."""
    total = 0
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for array in arrays:
            first, stop = array.unsafe_buffer_pointer(), array.unsafe_buffer_pointer() + array.nbytes
            file.seek(first // PAGE * 8)
            entries = np.frombuffer(file.read((stop - 1) // PAGE * 8 + 8 - first // PAGE * 8), np.uint64)
            total += int((entries >> np.uint64(63)).sum()) * PAGE
    return total


def zeros():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.jit(lambda: [jnp.zeros(SIZE // 8), jnp.zeros(SIZE // 8), jnp.ones(3)], out_shardings=device)()


def test_memory_comes_back_when_it_is_written():
    state = jax.block_until_ready(zeros())
    assert resident(state) > SIZE * 0.9
    given = give_back_zeros(state)
    assert given is state
    assert resident(state) < SIZE * 0.1
    write = jax.jit(lambda a, i: a.at[i].set(7.0), donate_argnums=0)
    jax.block_until_ready(write(jnp.zeros(SIZE // 8), 0))
    place = state[0].unsafe_buffer_pointer()
    state[0] = jax.block_until_ready(write(state[0], 1_000_000))
    assert state[0].unsafe_buffer_pointer() == place
    assert resident(state) < SIZE * 0.1
    assert float(state[0][1_000_000]) == 7.0
    assert np.array_equal(state[2], [1, 1, 1])
    assert float(jnp.abs(state[0]).sum()) == 7.0 and float(jnp.abs(state[1]).sum()) == 0.0


def test_small_arrays_stay_as_they_are():
    state = give_back_zeros([jnp.full((1000,), 3.0)])
    assert float(state[0].min()) == 3.0
