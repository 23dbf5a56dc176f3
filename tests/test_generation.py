"""Generation: ids in, ids out, then text; greedy golden ids, and fakes for what only a model's whim would show."""

import time
from pathlib import Path

import mlx.core as mx
import pytest

from openelm_mlx.checkpoint import load
from openelm_mlx.errors import GenerationError, TokenizerError
from openelm_mlx.generation import generate, generate_step, room_for, stream_generate
from openelm_mlx.sampling import make_logits_processors, make_sampler

TINY = Path(__file__).parent.parent / "openelm_mlx" / "data" / "tiny"
PROMPT = "Once upon a time there was a king who"


@pytest.fixture(scope="module")
def tiny():
    return load(TINY, dtype="float32")


class Scripted:
    """Stands in for a model: says the scripted tokens one after the other, and counts its calls."""

    def __init__(self, tokens, model):
        self.tokens, self.config, self.calls = tokens, model.config, []

    def __call__(self, new, cache, *, last_only):
        self.calls.append(new.shape[1])
        logits = mx.full((1, 1, self.config.vocab_size), 0.5)
        logits[0, 0, self.tokens[min(len(self.calls), len(self.tokens)) - 1]] = 1.0
        return logits

    def make_cache(self):
        return []

    def parameters(self):
        return {}


@pytest.mark.parametrize("prompt", [0, 1])
def test_greedy_ids_are_apples(tiny, golden, prompt):
    model, _ = tiny
    ids = golden[f"ids_{prompt}"]
    assert list(generate_step(ids.tolist(), model, max_tokens=40)) == golden[f"greedy_{prompt}"].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 7, 8])
def test_prefill_in_chunks_changes_nothing(tiny, golden, chunk):
    model, _ = tiny
    ids = golden["ids_0"].tolist()
    assert list(generate_step(ids, model, max_tokens=10, prefill_step_size=chunk)) == golden["greedy_0"][:10].tolist()


def test_a_cache_continues_where_it_was_left(tiny, golden):
    model, _ = tiny
    ids, cache = golden["ids_0"].tolist(), model.make_cache()
    first = list(generate_step(ids, model, max_tokens=5, cache=cache))
    rest = list(generate_step(first[-1:], model, max_tokens=5, cache=cache))
    assert first + rest == golden["greedy_0"][:10].tolist()


def test_no_step_is_computed_that_nobody_asked_for(tiny):
    fake = Scripted([5, 6, 7], tiny[0])
    assert list(generate_step([1, 2, 3], fake, max_tokens=3)) == [5, 6, 7]
    assert fake.calls == [3, 1, 1]  # the whole prompt at once, then one token each
    assert list(generate_step([1], fake, max_tokens=0)) == []


def test_the_joined_stream_is_the_text(tiny, golden):
    model, tokenizer = tiny
    responses = list(stream_generate(model, tokenizer, PROMPT, 40))
    assert [r.token for r in responses] == golden["greedy_0"].tolist()
    assert "".join(r.text for r in responses) == tokenizer.decode(golden["greedy_0"].tolist(), continuation=True)
    assert [r.finish_reason for r in responses] == [None] * 39 + ["length"]
    assert [r.generation_tokens for r in responses] == list(range(1, 41))
    assert responses[-1].prompt_tokens == len(golden["ids_0"])
    assert min(responses[-1].prompt_tps, responses[-1].generation_tps, responses[-1].peak_memory_bytes) > 0


def test_text_and_ids_are_the_same_prompt(tiny):
    model, tokenizer = tiny
    assert generate(model, tokenizer, PROMPT, 8) == generate(model, tokenizer, tokenizer.encode(PROMPT), 8)


def test_eos_ends_the_text_and_is_not_printed(tiny):  # fault D5: id 2 comes third
    model, tokenizer = tiny
    king, was = tokenizer.encode("king was", bos=False)[:2]
    responses = list(stream_generate(Scripted([king, was, 2, king], model), tokenizer, "x", 10))
    assert [r.token for r in responses] == [king, was, 2]
    assert responses[-1].finish_reason == "stop"
    assert "</s>" not in "".join(r.text for r in responses)


def test_a_stop_string_over_two_tokens_is_not_shown(tiny):  # fault D4
    model, tokenizer = tiny
    ids = tokenizer.encode("the king and the wolf", bos=False)
    responses = list(stream_generate(Scripted(ids, model), tokenizer, "x", 10, stop=["king and", "zebra"]))
    assert "".join(r.text for r in responses) == " the "
    assert responses[-1].finish_reason == "stop"
    assert len(responses) < len(ids)


def test_a_stop_string_never_completed_is_flushed(tiny):
    model, tokenizer = tiny
    ids = tokenizer.encode("the king", bos=False)
    shown = generate(Scripted(ids, model), tokenizer, "x", len(ids), stop=["king of"])
    assert shown == " the king"


def test_half_a_character_at_the_end_is_flushed(tiny):  # fault D1
    model, tokenizer = tiny
    smile = tokenizer.encode_segment("🙂")[-4:]  # four byte pieces
    assert generate(Scripted(smile, model), tokenizer, "x", 4) == "🙂"
    assert generate(Scripted(smile, model), tokenizer, "x", 2) == "\ufffd\ufffd"


def test_seed_decides(tiny):  # fault D14
    model, tokenizer = tiny
    one, again, two = (generate(model, tokenizer, PROMPT, 12, sampler=make_sampler(1.0, seed=s)) for s in (1, 1, 2))
    assert one == again != two


def test_the_penalty_sees_the_prompt(tiny):  # fault D11
    model, tokenizer = tiny
    seen = []

    def spy(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    ids = tokenizer.encode(PROMPT)
    made = list(generate_step(ids, model, max_tokens=3, logits_processors=[spy]))
    assert seen == [ids, ids + made[:1], ids + made[:2]]


def test_a_penalty_breaks_a_loop(tiny):
    loop = Scripted([9], tiny[0])
    assert list(generate_step([1, 9], loop, max_tokens=3)) == [9, 9, 9]
    assert 9 not in generate_step([1, 9], loop, max_tokens=3, logits_processors=make_logits_processors(4.0))


@pytest.mark.parametrize("ids", [[1, 4096], [-1, 5], [1, 10**9], [1, 2.5]])
def test_an_id_outside_the_vocabulary_is_refused(tiny, ids):  # faults.md section M: it would read foreign memory
    model, tokenizer = tiny
    with pytest.raises(TokenizerError):
        generate_step(ids, model)
    with pytest.raises(TokenizerError):
        stream_generate(model, tokenizer, ids)


def test_an_empty_prompt_is_refused(tiny):
    with pytest.raises(GenerationError, match="empty"):
        generate_step([], tiny[0])


def test_context_limit(tiny):  # fault A9
    model, tokenizer = tiny
    long = [5] * 250
    with pytest.raises(
        GenerationError, match=r"250 prompt tokens and 100 .* context of 256.* at most 6.*--exceed-context"
    ):
        stream_generate(model, tokenizer, long, 100)
    with pytest.raises(GenerationError, match="the prompt has 256 tokens"):
        stream_generate(model, tokenizer, [5] * 256)
    assert len(list(stream_generate(model, tokenizer, long))) == 6  # no length asked for: the room there is
    assert len(list(stream_generate(model, tokenizer, long, 20, exceed_context=True))) == 20


def test_a_held_cache_counts_towards_the_context(tiny):
    model, tokenizer = tiny
    cache = model.make_cache()
    list(generate_step([5] * 200, model, max_tokens=1, cache=cache))
    with pytest.raises(GenerationError, match="250 prompt tokens"):
        stream_generate(model, tokenizer, [5] * 50, 20, cache=cache)


@pytest.mark.parametrize(("prompt", "asked", "room"), [(10, None, 246), (10, 5, 5), (0, None, 256), (255, 1, 1)])
def test_room(prompt, asked, room):
    assert room_for(prompt, asked, 256, exceed=False) == room


def test_max_tokens_below_one_is_refused():
    with pytest.raises(GenerationError, match="max_tokens"):
        room_for(1, 0, 256, exceed=False)


def test_the_first_token_is_in_the_prefill_and_not_in_the_decode_rate(tiny, monkeypatch):  # faults I3, I4
    """A prompt that takes 0.2 s and tokens that take 0.01 s: the rates keep them apart."""
    model, tokenizer = tiny

    def slow(ids, model, **settings):
        time.sleep(0.2)
        for token in (5, 6, 7, 8):
            yield token
            time.sleep(0.01)

    monkeypatch.setattr("openelm_mlx.generation.generate_step", slow)
    last = list(stream_generate(model, tokenizer, [1, 5], 4))[-1]
    assert last.ttft_s >= 0.2
    assert last.prompt_tps <= 2 / 0.2
    assert 10 < last.generation_tps <= 3 / 0.03
