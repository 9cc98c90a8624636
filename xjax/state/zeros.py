"""Memory of arrays that hold nothing yet: given back to the system until somebody writes to it."""

import ctypes
import os
import sys
from typing import Any

import jax

_MADV_DONTNEED = 4  # of Linux: forget the contents of private memory, which reads as zeros from then on
_WORTH_IT = 1 << 20


def give_back_zeros(state: Any) -> Any:
    """Return memory that holds nothing but fresh zeros to the system; it comes back when it is written.

    state   a tree of arrays, all zero; returned as it is

    So a state takes memory as its pages come into use. Only on CPU under Linux; elsewhere nothing is done.
    """
    leaves = jax.block_until_ready(jax.tree.leaves(state))
    if sys.platform != "linux":
        return state
    page, libc = os.sysconf("SC_PAGE_SIZE"), ctypes.CDLL(None, use_errno=True)
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            buffer = shard.data
            if shard.device.platform != "cpu" or buffer.nbytes < _WORTH_IT:
                continue
            address = buffer.unsafe_buffer_pointer()
            first, last = -(-address // page) * page, (address + buffer.nbytes) // page * page
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)
    return state
