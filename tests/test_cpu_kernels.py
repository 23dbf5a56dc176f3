"""The CPU's own activation and attention: the same numbers as MLX's kernels, gradients included."""

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx import cpu_kernels


def exact_swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    return gate / (1 + np.exp(-gate)) * up


def test_swiglu_is_exact_to_float32_over_the_whole_range():
    gate = np.linspace(-80, 80, 20_001, dtype=np.float32)[None]
    up = np.full_like(gate, 1.5)
    ours = np.array(cpu_kernels.swiglu(mx.array(gate), mx.array(up)))
    np.testing.assert_allclose(ours, exact_swiglu(gate, up), rtol=5e-7, atol=1e-30)


@pytest.mark.parametrize(("gate", "expected"), [(np.nan, np.nan), (np.inf, np.inf), (1e30, 1e30), (-1e4, 0.0)])
def test_swiglu_at_the_ends(gate, expected):
    out = np.array(cpu_kernels.swiglu(mx.array([[gate, gate]]), mx.ones((1, 2))))
    np.testing.assert_allclose(out, [[expected, expected]], atol=1e-30)


def test_swiglu_has_the_gradient_of_the_plain_formula():
    mx.random.seed(0)
    gate, up = mx.random.normal((5, 7)), mx.random.normal((5, 7))
    ours = mx.grad(lambda g, u: (cpu_kernels.swiglu(g, u) ** 2).sum(), (0, 1))(gate, up)
    plain = mx.grad(lambda g, u: ((g * mx.sigmoid(g) * u) ** 2).sum(), (0, 1))(gate, up)
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("length", "held"), [(1, 1), (63, 63), (64, 64), (65, 65), (130, 200), (64, 129)])
def test_attention_in_blocks_is_attention(length, held):
    mx.random.seed(length)
    queries = mx.random.normal((2, 4, length, 8))
    keys, values = mx.random.normal((2, 2, held, 8)), mx.random.normal((2, 2, held, 8))
    ours = cpu_kernels.causal_attention(queries, keys, values, 0.3)
    whole = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask="causal")
    np.testing.assert_allclose(np.array(ours), np.array(whole), rtol=1e-5, atol=1e-6)


def test_they_apply_to_several_tokens_in_float32_on_a_cpu():
    on_cpu = not mx.metal.is_available()
    assert cpu_kernels.apply_to(mx.zeros((1, 2, 4))) is on_cpu
    assert not cpu_kernels.apply_to(mx.zeros((1, 1, 4)))
    assert not cpu_kernels.apply_to(mx.zeros((1, 2, 4), dtype=mx.bfloat16))
