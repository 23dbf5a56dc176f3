"""What a token must move and a prompt must compute, against a count written another way; and the shares reached."""

import math

import mlx.core as mx
import mlx.nn as nn
import pytest
from fake_bench import PROMPT
from reference import parameter_shapes, small_config

from openelm_mlx.benchmarks import device_limits, layer_profile, norms
from openelm_mlx.benchmarks.device_limits import DeviceLimits, measure_limits
from openelm_mlx.benchmarks.layer_profile import profile
from openelm_mlx.benchmarks.limits import Work, decode_work, layer_costs, prefill_work
from openelm_mlx.benchmarks.measure import measure, measure_in_turns
from openelm_mlx.benchmarks.session import Method, Shape
from openelm_mlx.config import PUBLISHED_SIZES, OpenELMConfig
from openelm_mlx.model import Model
from openelm_mlx.quantize import QuantizationSettings, plan

# The published sizes' weights in 16 bits, and a token's keys and values: known numbers, not computed by anything here.
BFLOAT16_BYTES = {"270M": 543_054_336, "450M": 914_358_272, "1_1B": 2_159_782_912, "3B": 6_073_294_848}
KV_BYTES = {"270M": 16_128, "450M": 23_296, "1_1B": 43_264, "3B": 83_968}


def unread_model(config, bits=None):
    """Shapes and dtypes are there, values are never computed."""
    model = Model(config)
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, class_predicate=plan(config, QuantizationSettings.of(bits=bits)).parameters_of)
    return model


def counted_bytes(shapes, bits):
    """Over all parameters: two bytes a number, or packed in groups of 64 with a scale and a bias of 16 bits each."""
    total = 0
    for name, shape in shapes.items():
        numbers = math.prod(shape)
        if bits is None or len(shape) == 1:
            total += 2 * numbers
        else:
            own = 8 if "token_embeddings" in name else bits
            total += numbers * own // 8 + numbers // 64 * 4
    return total


def counted_flops(config, positions, needed):
    """Position by position and head by head: `needed(layer, position)` says whether its output is used by anything."""
    total = 0
    for layer in range(config.num_transformer_layers):
        shapes = {n.split(".", 3)[3]: s for n, s in config.parameter_shapes().items() if f".layers.{layer}." in n}
        for position in positions:
            total += 2 * math.prod(shapes["attn.qkv_proj.weight"])
            if needed(layer, position):
                for _ in range(config.num_query_heads[layer]):
                    total += (position + 1) * config.head_dim * 2 * 2  # a score and a mix for each token so far
                for name in ("attn.out_proj.weight", "ffn.proj_1.weight", "ffn.proj_2.weight"):
                    total += 2 * math.prod(shapes[name])
    return total + 2 * config.vocab_size * config.model_dim


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("size", PUBLISHED_SIZES)
def test_bytes_and_operations_of_the_published_sizes(size, bits):
    config = OpenELMConfig.from_name(size)
    model = unread_model(config, bits)
    weights = counted_bytes(parameter_shapes(config.to_dict()), bits)
    assert bits is not None or weights == BFLOAT16_BYTES[size]
    step = decode_work(model, prompt_tokens=100, generation_tokens=1)
    assert step.nbytes == weights + KV_BYTES[size] * 100.5
    held = 37
    one = decode_work(model, prompt_tokens=held, generation_tokens=0)
    assert one.flops == counted_flops(config, [held - 1], lambda layer, position: True)
    last = config.num_transformer_layers - 1
    prompt = prefill_work(model, 24)
    assert prompt.flops == counted_flops(config, range(24), lambda layer, p: layer < last or p == 23)
    assert prompt.nbytes == weights + KV_BYTES[size] * 24
    costs = layer_costs(model)
    assert sum(cost.weight_bytes for cost in costs) == weights
    assert costs[last].weight_bytes > 3 * costs[0].weight_bytes  # layer-wise scaling
    assert sum(cost.kv_bytes_per_token for cost in costs) == KV_BYTES[size]


def test_the_mean_over_a_decode_is_the_mean_of_its_steps():
    """Step k after a prompt of P attends to P + k tokens; the weights are read once for all texts of a batch."""
    model = unread_model(OpenELMConfig.from_dict(small_config()))
    kv = sum(cost.kv_bytes_per_token for cost in layer_costs(model))
    weights = sum(cost.weight_bytes for cost in layer_costs(model))
    steps = [weights + 3 * kv * (10 + k) for k in range(1, 8)]
    assert decode_work(model, 10, 8, batch_size=3).nbytes == pytest.approx(sum(steps) / len(steps))


def test_an_untied_embedding_is_looked_up_and_not_read():
    tied, untied = (
        unread_model(OpenELMConfig.from_dict(small_config(share_input_output_layers=t))) for t in (True, False)
    )
    assert decode_work(tied, 8, 2).nbytes == decode_work(untied, 8, 2).nbytes


def test_the_higher_limit_binds_and_shares_are_of_it():
    limits = DeviceLimits(bandwidth_bytes_s=100.0, matmul_flops_s=1000.0, probe_bytes=1, dtype="float32")
    assert limits.least_s(Work(50, 100)) == 0.5
    assert limits.bound(Work(50, 100)) == "memory"
    assert limits.least_s(Work(50, 2000)) == 2.0
    assert limits.bound(Work(50, 2000)) == "compute"


@pytest.fixture(scope="module")
def small():
    model = Model(OpenELMConfig.from_dict(small_config()))
    model.eval()
    return model


def test_a_limit_is_the_best_that_a_fake_device_shows():
    """One second for everything, by the clock: the copy moves most bytes, the products' size stops growing."""
    ticks = iter(range(10_000))
    tick = lambda: float(next(ticks))  # noqa: E731
    assert device_limits.memory_bandwidth(2**20, mx.float32, tick) == 2 * 2**20
    assert device_limits.matmul_throughput(mx.float32, None, tick) == 2 * 256**3


def test_no_share_exceeds_one_on_this_device(small, monkeypatch):
    """A model reaches no more than its device; a small one much less, since starting kernels takes most of the time."""
    monkeypatch.setattr(device_limits, "_LARGEST_PRODUCT", 512)
    result = measure(small, "small", Shape(PROMPT, 6), Method(1))
    shares = measure_limits(small).shares(result, small)
    assert 0 < shares["decode"]["share"] < 1
    assert 0 < shares["prefill"]["share"] < 1
    assert shares["decode"]["bound"] == "memory"


def test_every_layer_is_profiled_and_the_parts_add_up(small):
    """A timer that says how many arrays it was asked for: parts without their norm are what is left of the chain."""
    calls = []

    def timer(work):
        mx.eval(work())
        calls.append(work)
        return 8.0 if len(calls) % 4 in (1, 2) else 24.0  # norm, norm, attention with norm, FFN with norm

    found = profile(small, Shape(PROMPT, 2), timer)
    assert [layer.layer for layer in found.layers] == [*range(len(small.layers)), None]
    assert all((layer.norms_s, layer.attention_s, layer.ffn_s) == (2.0, 2.0, 2.0) for layer in found.layers[:-1])
    assert found.sum_s == sum(found.part_sums().values())
    costs = layer_costs(small)
    assert [layer.step_bytes for layer in found.layers[:-1]] == [c.bytes_per_step(PROMPT) for c in costs[:-1]]
    rows = list(layer_profile.rows(found))
    assert len(rows) == len(costs)
    assert {len(row) for row in rows} == {len(layer_profile.HEADINGS)}


def test_a_profile_leaves_the_cache_as_it_was(small):
    caches = []
    make = small.make_cache
    small.make_cache = lambda: caches.append(make()) or caches[-1]
    profile(small, Shape(PROMPT, 2))
    assert {layer.offset for layer in caches[0]} == {PROMPT}
    del small.make_cache


@pytest.mark.parametrize("weight", [None, mx.array([0.5, 2.0, 1.0, -1.0])])
def test_the_naive_norm_computes_what_the_fused_one_does(weight):
    x = mx.random.normal((3, 4), key=mx.random.key(0))
    assert mx.allclose(norms.naive_rms_norm(x, weight, 1e-6), mx.fast.rms_norm(x, weight, 1e-6), atol=1e-5)


def test_each_norm_runs_in_the_whole_model_and_the_usual_one_returns(small):
    usual, tokens = mx.fast.rms_norm, mx.array([[1, 2, 3]])
    seen = []
    with norms.norm_kernel(lambda x, weight, eps: seen.append(x.shape) or usual(x, weight, eps)):
        mx.eval(small(tokens))
    layers = len(small.layers)
    assert len(seen) == 3 * layers + 1  # queries and keys in one kernel, so three of the paper's four a layer
    assert norms.norm_count(small.config) == 4 * layers + 1
    assert mx.fast.rms_norm is usual
    results = measure_in_turns(norms.norm_sessions(small, "small", Shape(4, 3), Method(1, max_warm_ups=1)))
    assert [result.variant for result in results] == list(norms.NORMS)
    assert mx.fast.rms_norm is usual


def test_the_published_counts_of_norms():
    assert norms.norm_count(OpenELMConfig.from_name("1_1B")) == 113


@pytest.mark.parametrize("bits", [None, 4])
def test_the_models_own_matrices_are_read_once_each(bits):
    """A second by the clock: bytes/s are the bytes, those of all matrices and none of the norms."""
    config = OpenELMConfig.from_dict(small_config())
    model = unread_model(config, bits)
    ticks = iter(range(100))
    norms_bytes = sum(2 * math.prod(s) for s in config.parameter_shapes().values() if len(s) == 1)
    expected = counted_bytes(config.parameter_shapes(), bits) - norms_bytes
    assert device_limits.weights_bandwidth(model, lambda: float(next(ticks))) == expected
