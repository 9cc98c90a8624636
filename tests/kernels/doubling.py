"""The smallest FFI call with threads, for test_ffi: 2 * x, one item a number; who did how many."""

from xjax.kernels import ffi

NAME = "xjax_test_doubling"
_X, _OUT, _BEGUN, _PAUSE = range(4)


def _item(job, index, worker):
    for _ in range(ffi.own(job, _PAUSE)):
        ffi.fetch_add(ffi.own(job, _BEGUN) + 8 * worker, 0)
    value = ffi.load_f32(ffi.own(job, _X) + 4 * index)
    ffi.store_f32(ffi.own(job, _OUT) + 4 * index, value + value)
    ffi.fetch_add(ffi.own(job, _BEGUN) + 8 * worker, 1)


_run = ffi.pool(NAME)


def _handler(frame):
    if ffi.is_question(frame):
        return 0
    x = ffi.argument(frame, 0)
    if ffi.dtype(x) != ffi.FLOAT32:
        return ffi.error(frame, ffi.INVALID_ARGUMENT, "doubling takes float32")
    job = ffi.make_job(ffi.dim(x, 0), 4, 4)
    if job == 0:
        return ffi.error(frame, ffi.RESOURCE_EXHAUSTED, "doubling has no memory")
    begun = ffi.data(ffi.result(frame, 1))
    for worker in range(4):
        ffi.store_i64(begun + 8 * worker, 0)
    ffi.store_i64(job + ffi.DATA, ffi.data(x))
    ffi.store_i64(job + ffi.DATA + 8, ffi.data(ffi.result(frame, 0)))
    ffi.store_i64(job + ffi.DATA + 16, begun)
    ffi.store_i64(job + ffi.DATA + 24, ffi.load_i64(ffi.attribute(frame, 0)))
    _run(frame, job)
    return 0


def register():
    ffi.register(NAME, _handler, _item)
