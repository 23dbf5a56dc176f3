"""How fast this device is at what a language model asks of it, measured in the run itself: memory and matrix products.

The best of several attempts at several operations: a limit is what the device can do, not what it does on average.
Memory is tried over as many bytes as the model's weights take, so that a model that fits into a cache is held against
the cache; and with those weights themselves, each matrix times a vector and nothing else. Vendors' data sheets are not
used: they say nothing of this machine's power mode and temperature.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..device import available_memory_bytes
from ..model import Model
from .limits import Work, decode_work, layer_costs, prefill_work
from .results import BenchResult
from .session import Clock

_LEAST_BYTES, _MOST_BYTES = 2**24, 2**30
_ROW = 4096  # numbers
_ATTEMPTS = 5
_ENOUGH_S = 0.05  # a product that takes this long is large enough
_LARGEST_PRODUCT = 4096
_GROUP_SIZE = 64


@dataclass(frozen=True)
class DeviceLimits:
    """What was reached at best. `probe_bytes` is the memory that bandwidth was measured over."""

    bandwidth_bytes_s: float
    matmul_flops_s: float
    probe_bytes: int
    dtype: str  # of the matrix products

    def least_s(self, work: Work) -> float:
        """Seconds that this work takes at least: moving and computing may overlap, neither can be left out."""
        return max(work.nbytes / self.bandwidth_bytes_s, work.flops / self.matmul_flops_s)

    def bound(self, work: Work) -> str:
        """Which of the two limits holds: `memory` or `compute`."""
        return "memory" if work.nbytes / self.bandwidth_bytes_s >= work.flops / self.matmul_flops_s else "compute"

    def shares(self, result: BenchResult, model: Model) -> dict[str, Any]:
        """Of `result`'s two phases: the work, which limit holds, and the share of it that was reached."""
        shape = (result.prompt_tokens, result.generation_tokens, result.batch_size)
        step_s = None if result.generation_tps is None else result.batch_size / result.generation_tps
        prefill, decode = prefill_work(model, result.prompt_tokens, result.batch_size), decode_work(model, *shape)
        return {"prefill": self._share(prefill, result.ttft_s), "decode": self._share(decode, step_s)}

    def _share(self, work: Work, seconds: float | None) -> dict[str, Any]:
        share = self.least_s(work) / seconds if seconds else None
        return {
            "bytes": work.nbytes,
            "flops": work.flops,
            "bound": self.bound(work),
            "seconds": seconds,
            "share": share,
        }


def measure_limits(model: Model, clock: Clock = time.perf_counter) -> DeviceLimits:
    """Probe the device with the model's own dtype and size; takes about a second."""
    weights = sum(cost.weight_bytes for cost in layer_costs(model))
    spare = available_memory_bytes() // 4
    nbytes = min(max(weights, _LEAST_BYTES), _MOST_BYTES, max(spare, _LEAST_BYTES))
    dtype = model.transformer.norm.weight.dtype
    bits = sorted({module.bits for module in model.modules() if hasattr(module, "bits")})
    bandwidth = max(memory_bandwidth(nbytes, dtype, clock), weights_bandwidth(model, clock))
    products = [matmul_throughput(dtype, None, clock), *(matmul_throughput(dtype, b, clock) for b in bits[:1])]
    mx.clear_cache()  # the probes' buffers are no part of what is measured next
    return DeviceLimits(bandwidth, max(products), nbytes, str(dtype).rpartition(".")[-1])


def memory_bandwidth(nbytes: int, dtype: mx.Dtype, clock: Clock = time.perf_counter) -> float:
    """Bytes/s, the best of reading (a sum, a matrix times a vector) and of copying, over `nbytes` of memory."""
    rows = max(1, nbytes // (_ROW * dtype.size))
    matrix = mx.ones((rows, _ROW), dtype)
    vector = mx.ones((_ROW,), dtype)
    words = mx.ones((rows * _ROW * dtype.size // 4,), mx.float32)
    mx.eval(matrix, vector, words)
    read = matrix.nbytes
    return max(
        read / _best_s(lambda: matrix @ vector, clock),
        read / _best_s(lambda: mx.sum(words), clock),
        2 * read / _best_s(lambda: words + 1, clock),  # read and written
    )


def weights_bandwidth(model: Model, clock: Clock = time.perf_counter) -> float:
    """Bytes/s when every matrix of the model meets one vector: what a decode step cannot do without."""
    dtype = model.transformer.norm.weight.dtype
    linears = [module for module in model.modules() if isinstance(module, nn.Linear | nn.QuantizedLinear)]
    products: list[tuple[Callable[[mx.array], mx.array], mx.array]] = [
        (linear, mx.ones((1, _input_width(linear)), dtype)) for linear in linears
    ]
    read = sum(array.nbytes for linear in linears for array in linear.values() if isinstance(array, mx.array))
    hidden = mx.ones((1, model.config.model_dim), dtype)
    if model.config.share_input_output_layers:
        read += sum(
            array.nbytes for array in model.transformer.token_embeddings.values() if isinstance(array, mx.array)
        )
        products.append((model.head, hidden))
    mx.eval([vector for _, vector in products], model.parameters())
    return read / _best_s(lambda: [multiply(vector) for multiply, vector in products], clock)


def _input_width(linear: nn.Linear | nn.QuantizedLinear) -> int:
    width = linear.weight.shape[1]
    return width * 32 // linear.bits if isinstance(linear, nn.QuantizedLinear) else width


def matmul_throughput(dtype: mx.Dtype, bits: int | None = None, clock: Clock = time.perf_counter) -> float:
    """Operations/s (2 a multiply-add) of a square matrix product, as large as takes a while; packed with `bits`."""
    size = 256
    while True:
        product = _product(size, dtype, bits)
        seconds = _best_s(product, clock)
        if seconds >= _ENOUGH_S or size >= _LARGEST_PRODUCT:
            return 2 * size**3 / seconds
        size *= 2


def _product(size: int, dtype: mx.Dtype, bits: int | None) -> Callable[[], mx.array]:
    left, right = (mx.random.normal((size, size)).astype(dtype) for _ in range(2))
    mx.eval(left, right)
    if bits is None:
        return lambda: left @ right.T
    packed = mx.quantize(right, group_size=_GROUP_SIZE, bits=bits)
    mx.eval(packed)
    return lambda: mx.quantized_matmul(left, *packed, transpose=True, group_size=_GROUP_SIZE, bits=bits)


def _best_s(work: Callable[[], mx.array | list[mx.array]], clock: Clock) -> float:
    """Seconds of the fastest attempt. A clock too coarse to tell counts as its least step, a nanosecond."""
    best = float("inf")
    for _ in range(1 + _ATTEMPTS):
        mx.synchronize()
        start = clock()
        mx.eval(work())
        mx.synchronize()
        best = min(best, clock() - start)
    return max(best, 1e-9)
