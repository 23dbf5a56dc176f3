"""Batches: every text is the one its prompt gives alone, whoever is in the batch with it."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import random_checkpoint, small_config

from openelm_mlx.batch import batch_generate, batch_stream
from openelm_mlx.batch_cache import BatchCache
from openelm_mlx.benchmarks import batching
from openelm_mlx.checkpoint import load
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import GenerationError, TokenizerError
from openelm_mlx.generation import stream_generate
from openelm_mlx.model import Model
from openelm_mlx.sampling import make_logits_processors, make_sampler

TINY = Path(__file__).parent.parent / "openelm_mlx" / "data" / "tiny"
PROMPTS = [
    "Once upon a time there was a king who",
    "The",
    "It was dark, and the old wolf",
    "",
    "\n\n'Go home,' said",
    "A",
]


@pytest.fixture(scope="module")
def tiny():
    return load(TINY, dtype="float32")


@pytest.fixture(scope="module")
def small() -> Model:
    model = Model(OpenELMConfig.from_dict(small_config()))
    model.load_weights([(name, mx.array(value)) for name, value in random_checkpoint(small_config(), seed=5).items()])
    model.eval()
    return model


def alone(model, tokenizer, prompt, max_tokens, **settings):
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens, **settings))
    return [r.token for r in responses], "".join(r.text for r in responses), responses[-1].finish_reason


def assert_as_alone(tiny, batch_size, max_tokens, fresh):
    """`fresh` makes the settings anew, as samplers have a state."""
    model, tokenizer = tiny
    results = batch_generate(model, tokenizer, PROMPTS, max_tokens, batch_size=batch_size, **fresh())
    assert [result.index for result in results] == list(range(len(PROMPTS)))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert (result.tokens, result.text, result.finish_reason) == alone(
            model, tokenizer, prompt, max_tokens, **fresh()
        )
        assert result.prompt_tokens == len(tokenizer.encode(prompt))


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
def test_greedy_texts_are_those_of_single_runs(tiny, batch_size):
    assert_as_alone(tiny, batch_size, 24, dict)


def test_sampled_texts_are_those_of_single_runs(tiny):
    assert_as_alone(tiny, 3, 16, lambda: {"sampler": make_sampler(0.8, top_p=0.95, seed=4)})


def test_penalised_texts_are_those_of_single_runs(tiny):
    assert_as_alone(tiny, 4, 16, lambda: {"logits_processors": make_logits_processors(1.3)})


def test_stop_strings_end_each_text_on_its_own(tiny):
    """Texts end at different steps, so rows leave and others join in the middle."""
    assert_as_alone(tiny, 3, 40, lambda: {"stop": [".", "said"]})


@settings(max_examples=8)
@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=9), min_size=2, max_size=5), st.data())
def test_rows_come_and_go_without_touching_the_others(small, prompts, data):
    """A batch cache fed by hand: after joins, steps and departures each row's logits are those of its own ids."""

    def own_cache(ids):
        cache = small.make_cache()
        mx.eval(small(mx.array([ids]), cache))
        return cache

    texts = [list(prompts[0])]
    cache = BatchCache(own_cache(prompts[0]))
    for ids in prompts[1:]:
        cache.join(own_cache(ids))
        texts.append(list(ids))
        for text in texts:
            text.append(data.draw(st.integers(1, 30)))
        logits = small(mx.array([[text[-1]] for text in texts]), cache.layers)[:, -1]
        cache.advance()
        expected = np.concatenate([np.array(small(mx.array([text]))[:, -1]) for text in texts])
        assert np.abs(np.array(logits) - expected).max() < 1e-4
        if len(texts) > 2:
            kept = sorted(data.draw(st.sets(st.integers(0, len(texts) - 1), min_size=1)))
            cache.keep(kept)
            texts = [texts[i] for i in kept]


def test_long_rows_outgrow_a_block(small):
    cache = BatchCache((own := small.make_cache()) and (mx.eval(small(mx.array([[3] * 250]), own)) or own))
    cache.join((other := small.make_cache()) and (mx.eval(small(mx.array([[4, 5]]), other)) or other))
    for _ in range(12):
        logits = small(mx.array([[3], [6]]), cache.layers)[:, -1]
        cache.advance()
    expected = np.array(small(mx.array([[4, 5] + [6] * 12]))[0, -1])
    assert np.abs(np.array(logits[1]) - expected).max() < 1e-4


def test_results_come_as_they_are_finished(tiny):
    model, tokenizer = tiny
    long, short = "Once upon a time", [5] * 250  # the second has room for six tokens only
    order = [result.index for result in batch_stream(model, tokenizer, [long, short], batch_size=2)]
    assert order == [1, 0]


@pytest.mark.parametrize(
    ("prompts", "error", "words"),
    [
        (["ok", []], GenerationError, "prompt 2: the prompt is empty"),
        ([[1, 9999]], TokenizerError, "prompt 1: token id 9999"),
        ([[5] * 256], GenerationError, "prompt 1: the prompt has 256 tokens"),
    ],
)
def test_the_prompt_at_fault_is_named_before_any_work(tiny, prompts, error, words):
    with pytest.raises(error, match=words):
        batch_generate(*tiny, prompts)


def test_a_batch_of_none_is_refused(tiny):
    with pytest.raises(GenerationError, match="batch_size"):
        batch_generate(*tiny, ["x"], batch_size=0)


def test_no_prompts_no_results(tiny):
    assert batch_generate(*tiny, []) == []


def test_the_benchmark_compares_equal_texts(capsys, tmp_path):
    """The figures depend on the machine; that both sides make the same texts does not."""
    figures = tmp_path / "figures.json"
    batching.main(["--tokens", "4", "--batch-size", "3", "--trials", "1", "--json", str(figures)])
    assert "the texts are the same" in capsys.readouterr().out
    assert set(json.loads(figures.read_text())) == {"single_tps", "batch_tps", "same_texts"}
