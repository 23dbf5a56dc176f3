"""What MLX's CPU backend does slowly in a prompt, done faster there; on Metal the fused kernels are the fast ones.

On x86 its `exp` takes one number at a time, and a prompt spends a third of its time in the activations and in softmax.
So the activation gets an exponential of multiplications and additions, which compile into vector instructions, and
attention goes through the prompt in blocks of queries, so that half of the masked scores are never computed.
"""

from functools import partial

import mlx.core as mx

from .device import is_metal

_QUERIES = 64  # in a block of attention: the masked part of a block is computed for nothing
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts, the first with zeros at its end
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23  # of an IEEE float32


def apply_to(x: mx.array) -> bool:
    """Whether `x` (..., L, D) holds several tokens in float32, on a CPU."""
    return x.shape[-2] > 1 and x.dtype == mx.float32 and not is_metal()


@mx.custom_function
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """gate * sigmoid(gate) * up in float32, any shape; relative error of the exponential below 3e-7."""
    fraction, power_bits = _exp_parts(-gate)
    return _gated(gate, up, fraction, power_bits.view(mx.float32))


@swiglu.vjp
def _swiglu_vjp(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, _output: mx.array
) -> tuple[mx.array, mx.array]:
    gate, up = primals
    share = mx.sigmoid(gate)
    return cotangent * up * share * (1 + gate * (1 - share)), cotangent * gate * share


def causal_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention whose L queries are the last of the S keys.

    queries: (B, Hq, L, D); keys, values: (B, Hk, S, D), Hk a divisor of Hq. Returns (B, Hq, L, D).
    """
    length, before = queries.shape[2], keys.shape[2] - queries.shape[2]
    blocks = []
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        seen = before + end
        block = queries[:, :, start:end]
        blocks.append(
            mx.fast.scaled_dot_product_attention(
                block, keys[:, :, :seen], values[:, :, :seen], scale=scale, mask="causal"
            )
        )
    return mx.concatenate(blocks, axis=2) if len(blocks) > 1 else blocks[0]


@partial(mx.compile, shapeless=True)
def _exp_parts(x: mx.array) -> tuple[mx.array, mx.array]:
    """exp(x) as f * 2**n: f as float32, 2**n as the bits of a float32. NaN stays NaN, in f."""
    x = mx.minimum(mx.maximum(x, -87.0), 88.0)  # beyond, float32 has no normal numbers
    n = mx.round(x * 1.4426950408889634)
    r = x - n * _LN2_HIGH - n * _LN2_LOW  # |r| <= ln(2) / 2
    fraction = 1 + r * (1 + r * (1 / 2 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720))))))
    return fraction, (n.astype(mx.int32) + _EXPONENT_BIAS) << _MANTISSA_BITS


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, up: mx.array, fraction: mx.array, power: mx.array) -> mx.array:
    return gate * up / (1 + fraction * power)
