"""The compiled decode step: the eager step's logits, ids and caches, whatever the model, in one graph a block."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from caching import small_model
from measures import kl

from openelm_mlx import compiled
from openelm_mlx.adapter_layers import DoRALinear, LoRAEmbedding, LoRALinear
from openelm_mlx.benchmarks.graph_nodes import decode_step_nodes, graph_nodes
from openelm_mlx.cache import KVCache
from openelm_mlx.caches import make_cache
from openelm_mlx.checkpoint import load_model
from openelm_mlx.compiled import CompiledDecoder, can_compile

TINY = Path(__file__).parent.parent / "openelm_mlx" / "data" / "tiny"
PROMPT = [3, 9, 4, 4, 20, 7]
TEXT = [1, 15, 2, 30, 11, 6, 8, 5, 12, 3, 3, 9, 21, 40, 17, 2, 6, 33, 1, 10]  # more than two blocks of eight


@pytest.fixture(autouse=True)
def blocks_of_eight(monkeypatch):
    """Small blocks, so that a short text fills several."""
    monkeypatch.setattr(KVCache, "block", 8)


def prefilled(model, ids=PROMPT):
    cache = model.make_cache()
    mx.eval(model(mx.array([ids]), cache, last_only=True))
    return cache


def eager(model, ids, cache) -> np.ndarray:
    """Logits (L, V) of ids run one by one, in float32."""
    rows = [model(mx.array([[token]]), cache, last_only=True)[:, -1] for token in ids]
    return np.array(mx.concatenate(rows).astype(mx.float32))


def stepped(decoder, ids) -> np.ndarray:
    """The same by the compiled step."""
    return np.array(mx.concatenate([decoder.step(mx.array([token])) for token in ids]).astype(mx.float32))


def adapted(linear, wrapper):
    """An adapter that changes something."""
    layer = wrapper(linear, 2, 3.0)
    layer.lora_b = mx.random.normal(layer.lora_b.shape)
    return layer


def with_adapters(model):
    mx.random.seed(0)
    layers = model.layers
    layers[0].attn.qkv_proj = adapted(layers[0].attn.qkv_proj, LoRALinear)
    layers[1].ffn.proj_2 = adapted(layers[1].ffn.proj_2, DoRALinear)
    model.transformer.token_embeddings = adapted(model.transformer.token_embeddings, LoRAEmbedding)
    model.eval()
    return model


def quantized(model):
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, layer: _packs(layer))
    return model


def _packs(layer) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[1] % 32 == 0


MODELS = {
    "uneven heads": lambda: small_model(num_query_heads=[2, 4, 4, 6], num_kv_heads=[1, 2, 2, 3]),
    "untied": lambda: small_model(share_input_output_layers=False),
    "no gate": lambda: small_model(ffn_with_glu=False),
    "no query/key norm": lambda: small_model(normalize_qk_projections=False),
    "4 bits": lambda: quantized(small_model()),
    "adapters": lambda: with_adapters(small_model()),
    "adapters on 4 bits": lambda: with_adapters(quantized(small_model())),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_equals_the_eager_step_beyond_the_ends_of_blocks(make):
    model = make()
    expected = eager(model, TEXT, prefilled(model))
    got = stepped(CompiledDecoder(model, prefilled(model)), TEXT)
    assert np.abs(got - expected).max() < 1e-4
    assert (got.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("prompt", [0, 1])
def test_greedy_ids_are_apples(golden, prompt, monkeypatch):
    monkeypatch.setattr(KVCache, "block", 256)
    model = load_model(TINY, dtype="float32")
    cache = model.make_cache()
    token = model(mx.array(golden[f"ids_{prompt}"])[None], cache, last_only=True)[:, -1].argmax(-1)
    decoder, ids = CompiledDecoder(model, cache), []
    for _ in range(40):
        ids.append(token.item())
        token = decoder.step(token).argmax(-1)
    assert ids == golden[f"greedy_{prompt}"].tolist()


def test_bfloat16_stays_close():
    """On a CPU the two are equal bit for bit; the bound, in nats a token, leaves room for other devices' kernels."""
    model = small_model()
    model.set_dtype(mx.bfloat16)
    expected = eager(model, TEXT, prefilled(model))
    logits = stepped(CompiledDecoder(model, prefilled(model)), TEXT)
    assert abs(kl(expected, logits)) < 1e-4


def test_the_caches_are_the_eager_steps():
    model = small_model()
    one, other = prefilled(model), prefilled(model)
    eager(model, TEXT, one)
    stepped(CompiledDecoder(model, other), TEXT)
    for a, b in zip(one, other, strict=True):
        assert a.offset == b.offset == len(PROMPT + TEXT)
        assert a.keys.shape == b.keys.shape
        assert mx.abs(a.keys - b.keys).max().item() < 1e-5
        assert mx.abs(a.values - b.values).max().item() < 1e-5


def test_eager_and_compiled_steps_mix_with_trimming_and_prefill():
    model = small_model()
    cache = prefilled(model)
    decoder = CompiledDecoder(model, cache)
    stepped(decoder, TEXT[:5])
    for layer in cache:
        layer.trim(3)
    stepped(decoder, TEXT[2:4])  # over what was trimmed
    model(mx.array([TEXT[4:12]]), cache)
    got = stepped(decoder, TEXT[12:])
    assert np.abs(got - eager(model, TEXT, prefilled(model))[12:]).max() < 1e-4


def test_what_lies_beyond_the_offset_is_never_seen():
    model = small_model()
    cache = prefilled(model, PROMPT[:3])
    for layer in cache:
        layer.keys[:, :, 3:] = 50.0
        layer.values[:, :, 3:] = 1e6
    got = stepped(CompiledDecoder(model, cache), PROMPT[3:])
    assert np.abs(got - eager(model, PROMPT[3:], prefilled(model, PROMPT[:3]))).max() < 1e-4


def test_an_empty_cache_is_filled():
    model = small_model()
    got = stepped(CompiledDecoder(model, model.make_cache()), PROMPT)
    assert np.abs(got - eager(model, PROMPT, model.make_cache())).max() < 1e-4


def test_one_compilation_for_each_block(monkeypatch):
    traced = []
    step = compiled._step
    monkeypatch.setattr(compiled, "_step", lambda *given: traced.append(given[-1][0][0].shape[2]) or step(*given))
    model = small_model()
    stepped(CompiledDecoder(model, prefilled(model)), TEXT)  # the 7th to the 26th token
    assert traced == [8, 16, 24, 32]


@pytest.mark.parametrize("change", ["a weight", "a norm", "all weights", "an adapter", "a shape that stays"])
def test_a_change_of_the_model_is_seen_at_once(change):
    model = small_model()
    cache = prefilled(model)
    decoder = CompiledDecoder(model, cache)
    before = stepped(decoder, TEXT[:1])
    block = model.layers[1]
    if change == "a weight":
        block.ffn.proj_1.weight = block.ffn.proj_1.weight * 2
    elif change == "a norm":
        block.attn.q_norm.weight = block.attn.q_norm.weight * 3
    elif change == "all weights":
        model.update(small_model(seed=2).parameters())
    elif change == "an adapter":
        with_adapters(model)
    else:
        block.ffn.proj_2 = nn.Linear(*reversed(block.ffn.proj_2.weight.shape), bias=False)
    for layer in cache:
        layer.trim(1)
    state = [[mx.array(array) for array in layer.state] for layer in cache]
    got = stepped(decoder, TEXT[:1])
    for layer, (keys, values) in zip(cache, state, strict=True):
        layer.keys, layer.values, layer.offset = keys, values, layer.offset - 1
    assert np.abs(got - eager(model, TEXT[:1], cache)).max() < 1e-4
    assert np.abs(got - before).max() > 1e-3


def test_weights_are_not_copied_and_are_let_go(monkeypatch):
    monkeypatch.setattr(KVCache, "block", 16)
    model = small_model(vocab_size=20000)  # its embedding is larger than everything else
    mx.eval(model.parameters())
    cache = prefilled(model)
    embedding = model.transformer.token_embeddings
    mx.clear_cache()
    held, cache_bytes = mx.get_active_memory(), sum(layer.nbytes for layer in cache)
    mx.reset_peak_memory()
    decoder = CompiledDecoder(model, cache)
    stepped(decoder, TEXT[:5])
    assert mx.get_peak_memory() - held < embedding.weight.nbytes // 2 + 2 * cache_bytes
    assert mx.get_active_memory() - held < cache_bytes
    embedding_bytes = embedding.weight.nbytes
    del decoder, model, embedding
    assert held - mx.get_active_memory() > embedding_bytes // 2


def test_what_was_not_evaluated_is_computed_once(monkeypatch):
    """Weights that are still to be read or dequantised must not be part of the graph, computed for every token."""
    monkeypatch.setattr(KVCache, "block", 16)
    model = small_model()
    cache = prefilled(model)
    decoder = CompiledDecoder(model, cache)
    evaluated = _nodes(decoder.step(mx.array([1])), cache)
    model.update({"transformer": {"norm": {"weight": mx.sort(model.transformer.norm.weight)}}})
    mx.eval(decoder.step(mx.array([1])))
    assert _nodes(decoder.step(mx.array([1])), cache) == evaluated


def _nodes(logits, cache) -> int:
    return graph_nodes([logits, *(array for layer in cache for array in layer.state)])


def test_the_graph_is_little_more_than_half_of_the_eager_one():
    model = small_model()

    def nodes(step) -> int:
        cache = model.make_cache()
        decoder = CompiledDecoder(model, cache)
        return decode_step_nodes(model, cache, lambda tokens: step(decoder, cache, tokens).argmax(-1))

    def eager_step(_, cache, tokens):
        return model(tokens, cache, last_only=True)[:, -1]

    def compiled_step(decoder, cache, tokens):
        return decoder.step(tokens[0]) if tokens.shape[1] == 1 else eager_step(decoder, cache, tokens)

    assert nodes(compiled_step) < 0.65 * nodes(eager_step)


@pytest.mark.parametrize("kind", [{"max_kv_size": 8}, {"kv_bits": 8}])
def test_other_caches_are_not_compiled(kind):
    model = small_model()
    assert can_compile(model, model.make_cache())
    assert not can_compile(model, make_cache(model, **kind))


def test_what_stands_in_for_a_model_is_not_compiled():
    model = small_model()
    assert not can_compile(lambda *given, **settings: model(*given, **settings), model.make_cache())


def test_a_model_in_training_is_not_compiled():
    model = small_model()
    model.train()
    assert not can_compile(model, model.make_cache())
