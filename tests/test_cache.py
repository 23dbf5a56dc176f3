"""The caches: whatever the chunks in which a text comes, and however it was trimmed, one result."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from caching import KINDS, TINY, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from measures import kl

from openelm_mlx.cache import KVCache
from openelm_mlx.caches import make_cache
from openelm_mlx.checkpoint import load_model
from openelm_mlx.errors import GenerationError
from openelm_mlx.generation import generate_step
from openelm_mlx.model import Model
from openelm_mlx.quantized_cache import QuantizedKVCache
from openelm_mlx.rotating_cache import RotatingKVCache


@pytest.fixture(scope="module")
def small() -> Model:
    return small_model()


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load_model(TINY, dtype="float32")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4 tokens, so that a short text grows through many."""
    monkeypatch.setattr(KVCache, "block", 4)


def some_ids(count: int) -> list[int]:
    return (np.random.default_rng(count).integers(3, 256, count)).tolist()


def run(model: Model, ids: list[int], cache: list[KVCache] | None, chunks: Sequence[int] = ()) -> np.ndarray:
    """Logits (L, V) of a text that comes in chunks of these lengths, and the rest at once."""
    pieces, start = [], 0
    for length in [*chunks, len(ids)]:
        if start < len(ids):
            pieces.append(model(mx.array([ids[start : start + length]]), cache)[0])
            start += length
    return np.array(mx.concatenate(pieces))


class Windowed(KVCache):
    """The reference of a rotating cache: holds everything, and a mask shows each token what is kept when it comes."""

    def __init__(self, max_size: int, keep: int):
        super().__init__()
        self.max_size, self.keep = max_size, keep

    def mask(self, num_queries):
        rows, kept = [], []
        for position in range(self.offset):
            kept.append(position)
            if len(kept) > self.max_size:
                del kept[self.keep]  # the oldest of those that may go
            rows.append([key in kept for key in range(self.offset)])
        return mx.array(rows[self.offset - num_queries :])


def windowed(model: Model, ids: list[int], max_size: int, keep: int) -> np.ndarray:
    return run(model, ids, [Windowed(max_size, keep) for _ in model.layers])


class TestPlain:
    @pytest.mark.usefixtures("small_blocks")
    @pytest.mark.parametrize("chunks", [[1] * 21, [4, 4, 4], [3, 1, 1, 9], [20]])
    def test_grown_in_blocks_equals_no_cache(self, small, chunks):
        cache = small.make_cache()
        assert np.abs(run(small, some_ids(21), cache, chunks) - run(small, some_ids(21), None)).max() < 1e-5
        assert [layer.offset for layer in cache] == [21] * 4

    def test_memory_is_whole_blocks(self, small):
        cache = small.make_cache()
        assert [layer.nbytes for layer in cache] == [0] * 4
        run(small, some_ids(21), cache)
        assert [layer.nbytes for layer in cache] == [2 * heads * 256 * 32 * 4 for heads in small.config.num_kv_heads]


class TestTrim:
    @pytest.mark.usefixtures("small_blocks")
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("count", [0, 1, 3, 8])
    def test_trimmed_equals_never_seen(self, small, kind, count):
        ids, other = some_ids(8), some_ids(6)
        cache, fresh = make_cache(small, **KINDS[kind]), make_cache(small, **KINDS[kind])
        run(small, ids, cache, [5, 1, 1])
        for layer in cache:
            assert layer.is_trimmable()
            layer.trim(count)
        if count < 8:
            run(small, ids[: 8 - count], fresh, [5, 1, 1])
        assert [layer.offset for layer in cache] == [8 - count] * 4
        assert np.abs(run(small, other, cache) - run(small, other, fresh)).max() < 1e-5

    def test_more_than_all_is_all(self, small):
        cache = small.make_cache()
        run(small, some_ids(5), cache)
        cache[0].trim(9)
        assert cache[0].offset == 0

    def test_a_full_ring_goes_back_and_a_turned_one_does_not(self, small):
        cache = make_cache(small, max_kv_size=8, keep=2)
        run(small, some_ids(8), cache, [1] * 8)
        for layer in cache:
            layer.trim(3)
        again = run(small, some_ids(7), cache, [1] * 7)
        assert np.abs(again - windowed(small, some_ids(8)[:5] + some_ids(7), 8, 2)[5:]).max() < 1e-5
        assert not cache[0].is_trimmable()
        cache[0].trim(0)
        with pytest.raises(GenerationError, match=r"rotating cache of 8 tokens that has seen 12 .*fresh cache"):
            cache[0].trim(1)


class TestRotating:
    @settings(max_examples=25)
    @given(
        st.integers(0, 5), st.integers(1, 9), st.lists(st.integers(1, 14), max_size=30), st.sampled_from([4, 256]),
    )  # fmt: skip
    def test_equals_a_mask_of_what_is_kept(self, small, keep, window, chunks, block):  # faults D9, D18
        """Any size, any chunks, single steps among them, before, at and after the turn."""
        max_size, ids = keep + window, some_ids(30)
        cache = [RotatingKVCache(max_size, keep) for _ in small.layers]
        for layer in cache:
            layer.block = block
        assert np.abs(run(small, ids, cache, chunks) - windowed(small, ids, max_size, keep)).max() < 1e-5
        assert {layer.offset for layer in cache} == {30}
        assert {array.shape[2] for layer in cache for array in layer.state} == {max_size}

    @pytest.mark.parametrize("length", [7, 8, 9, 16, 17])
    @pytest.mark.parametrize("max_size", [8, 16])
    def test_single_steps_over_the_turn(self, small, length, max_size):  # fault D9: one token too many, or too few
        ids = some_ids(length)
        cache = make_cache(small, max_kv_size=max_size, keep=1)
        assert np.abs(run(small, ids, cache, [1] * length) - windowed(small, ids, max_size, 1)).max() < 1e-5

    def test_large_enough_is_plain(self, small):
        ids = some_ids(20)
        cache = make_cache(small, max_kv_size=20, keep=1)
        assert np.abs(run(small, ids, cache, [6, 1]) - run(small, ids, None)).max() < 1e-5

    def test_what_is_overwritten_is_forgotten(self, small):
        ids = some_ids(20)
        assert np.abs(windowed(small, ids, 19, 1) - run(small, ids, None))[:-1].max() < 1e-5
        assert np.abs(windowed(small, ids, 19, 1) - run(small, ids, None))[-1].max() > 1e-3

    @pytest.mark.parametrize("chunks", [[20], [8, 6, 6], [3, 9, 1, 7]])
    def test_logits_of_the_last_position_only(self, small, chunks):
        cache, ids, start = make_cache(small, max_kv_size=8, keep=2), some_ids(20), 0
        expected = windowed(small, ids, 8, 2)
        for length in chunks:
            last = small(mx.array([ids[start : start + length]]), cache, last_only=True)
            start += length
            assert np.abs(np.array(last[0, -1]) - expected[start - 1]).max() < 1e-5

    def test_rows_of_a_batch_do_not_meet(self, small):
        rows = [some_ids(15), some_ids(16)[:15]]
        cache = make_cache(small, max_kv_size=6, keep=1)
        got = [small(mx.array([row[start:end] for row in rows]), cache) for start, end in ((0, 9), (9, 10), (10, 15))]
        for row, logits in zip(rows, np.array(mx.concatenate(got, axis=1)), strict=True):
            assert np.abs(logits - windowed(small, row, 6, 1)).max() < 1e-5

    def test_a_long_prompt_takes_bounded_memory(self, small):  # fault D18
        cache = make_cache(small, max_kv_size=40, keep=1)
        list(generate_step(some_ids(500), small, max_tokens=3, cache=cache, prefill_step_size=64))
        assert [layer.nbytes for layer in cache] == [2 * heads * 40 * 32 * 4 for heads in small.config.num_kv_heads]
        assert cache[0].offset == 502  # the last of the three tokens is not run

    def test_slots_and_positions_are_inverse(self):
        cache = RotatingKVCache(7, 3)
        for offset in range(1, 30):
            positions = cache.positions(offset).tolist()
            assert [cache.slot(position) for position in positions] == list(range(min(offset, 7)))
            assert sorted(positions)[-4:] == list(range(max(0, offset - 4), offset))


class TestQuantized:
    @pytest.mark.usefixtures("small_blocks")
    @pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize(("head_dim", "group_size"), [(32, 32), (64, 64), (128, 64)])
    def test_holds_what_mlx_quantises(self, bits, dtype, head_dim, group_size):
        mx.random.seed(0)
        keys, values = (mx.random.normal((2, 3, 11, head_dim)).astype(dtype) for _ in range(2))
        cache = QuantizedKVCache(bits, group_size, head_dim)
        for start, end in ((0, 3), (3, 4), (4, 11)):
            held = cache.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])
        for got, given_ in zip(held, (keys, values), strict=True):
            settings = {"group_size": group_size, "bits": bits}
            assert got.dtype == dtype
            assert mx.array_equal(got, mx.dequantize(*mx.quantize(given_, **settings), **settings))

    # Measured: at most 1.6e-5 nats a token in 8 bits, 6.3e-3 in 4. The bounds leave a factor of three.
    @pytest.mark.parametrize(("bits", "bound"), [(8, 5e-5), (4, 2e-2)])
    def test_distance_from_float32(self, tiny, golden, bits, bound):
        for prompt in (0, 1):
            ids = [*golden[f"ids_{prompt}"].tolist(), *golden[f"greedy_{prompt}"].tolist()]
            logits = run(tiny, ids, make_cache(tiny, kv_bits=bits), [10, 1])
            assert 0 < kl(run(tiny, ids, None), logits) < bound

    @pytest.mark.parametrize("bits", [4, 8])
    def test_memory(self, small, bits):
        cache = make_cache(small, kv_bits=bits)
        run(small, some_ids(5), cache)
        row_bytes = 32 * bits // 8 + 2 * 4  # codes, and one group's scale and bias in float32
        assert [layer.nbytes for layer in cache] == [2 * heads * 256 * row_bytes for heads in small.config.num_kv_heads]

    def test_a_model_without_fitting_groups_is_refused(self):
        with pytest.raises(GenerationError, match="dimension is 32 or a multiple of 64, this model's have 16"):
            make_cache(small_model(head_dim=16), kv_bits=8)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_chunks_changes_no_token(tiny, golden, kind):
    ids = golden["ids_0"].tolist() * 2  # longer than the rotating cache
    at_once, cut = (
        list(generate_step(ids, tiny, max_tokens=6, cache=make_cache(tiny, **KINDS[kind]), prefill_step_size=size))
        for size in (2048, 3)
    )
    assert at_once == cut


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_kv_size": 10, "kv_bits": 8}, "either bounded or quantised"),
        ({"max_kv_size": 4, "keep": 4}, r"max_kv_size 4 .* the 4 tokens .* give 5 or more"),
        ({"max_kv_size": 0}, "give 1 or more"),
        ({"max_kv_size": -3}, "give 1 or more"),
        ({"kv_bits": 3}, "must be 4 or 8, got 3"),
    ],
)
def test_what_cannot_be_is_refused(small, settings, words):
    with pytest.raises(GenerationError, match=words):
        make_cache(small, **settings)


def test_the_default_is_plain(small):
    assert [type(layer) for layer in make_cache(small)] == [KVCache] * 4
