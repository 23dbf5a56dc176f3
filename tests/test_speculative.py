"""Speculation: whatever is guessed, the model's own tokens come out, and the caches hold what was said and no more."""

import random
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import random_checkpoint, small_config

from openelm_mlx.cache import KVCache
from openelm_mlx.caches import make_cache
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.drafts import Draft, Drafter, ModelDrafter
from openelm_mlx.errors import GenerationError, TokenizerError
from openelm_mlx.generation import generate_step
from openelm_mlx.model import Model
from openelm_mlx.prompt_lookup import PromptLookup
from openelm_mlx.sampling import make_logits_processors, make_sampler
from openelm_mlx.speculative import accept_or_redraw, speculative_step

VOCAB = 64
TOKENS = 18


def build(seed: int, **changes) -> Model:
    """A random model with uneven layers; the seed decides its weights."""
    raw = small_config(vocab_size=VOCAB, model_dim=64, head_dim=32, ffn_multipliers=[0.5, 1.0], **changes)
    model = Model(OpenELMConfig.from_dict(raw))
    weights = random_checkpoint(raw, seed)
    # Scaled, so that the next token depends on the context and texts do not all end in one repeated token.
    weights["transformer.norm.weight"] *= 3
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()], strict=True)
    model.eval()
    return model


MODELS = [build(seed, num_transformer_layers=3) for seed in range(2)]
OTHER = build(9, num_transformer_layers=2, num_query_heads=[4, 2], num_kv_heads=[2, 1])
PROMPTS = [[1, 5, 9, 7], [1], [1, *[8, 3, 40, 22, 17] * 4], list(range(1, 40))]
SETTINGS = {
    "greedy": {},
    "penalty": {"penalty": 1.3},
    "sampled": {"temp": 0.9},
    "filtered": {"temp": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "penalty": 1.1},
}


def arguments(penalty=None, **sampling) -> dict:
    """Fresh keyword arguments for a run."""
    sampler = make_sampler(seed=5, **sampling) if sampling else None
    return {"sampler": sampler, "logits_processors": make_logits_processors(penalty)}


class Prophet(Drafter):
    """Knows the text to come and proposes it, with a mistake now and then, in drafts of any length."""

    def __init__(self, text, seed=0, mistakes=0.3):
        super().__init__(6)
        self.coming, self.random, self.mistakes = text, random.Random(seed), mistakes

    def begin(self, held, prompt):
        super().begin(held, prompt)
        self.start = len(self.text)

    def expects(self):
        return self.random.random() < 0.8

    def propose(self, limit, sampler, logits_processors):
        at = len(self.text) - self.start
        draft = self.coming[at : at + self.random.randint(0, min(limit, self.num_draft_tokens))]
        draft = [self.random.randrange(VOCAB) if self.random.random() < self.mistakes else t for t in draft]
        return Draft(mx.array(draft, mx.uint32)) if draft else None


def tokens_of(*args, **kwargs) -> list[int]:
    return [drafted.token for drafted in speculative_step(*args, **kwargs)]


class Chain:
    """Stands in for a model over five tokens: the next token depends on the last alone."""

    def __init__(self, seed):
        self.logprobs = mx.array(np.log(np.random.default_rng(seed).dirichlet(np.ones(5), 5)), dtype=mx.float32)
        self.config = MODELS[0].config
        self.fed = []  # how many tokens each call was given

    def __call__(self, tokens, cache, *, last_only=False):
        cache[0].offset += tokens.shape[1]
        self.fed.append(tokens.shape[1])
        return self.logprobs[tokens[:, -1:] if last_only else tokens]

    def make_cache(self):
        return [KVCache()]


def check_frequencies(counts, probabilities):
    """Pearson's chi-squared test, with a bound that one seed in thousands would miss."""
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = max(len(expected) - 1, 1)
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


class TestSameTokens:
    """In float32, token by token what `generate_step` gives."""

    @pytest.mark.parametrize("name", SETTINGS)
    @settings(max_examples=8)
    @given(st.integers(0, 1), st.sampled_from(PROMPTS), st.integers(0, 10**6), st.sampled_from([0, 0.2, 0.5, 1]))
    def test_whatever_is_drafted(self, name, number, prompt, seed, mistakes):
        model = MODELS[number]
        plain = list(generate_step(prompt, model, max_tokens=TOKENS, **arguments(**SETTINGS[name])))
        prophet = Prophet(plain, seed, mistakes)
        assert tokens_of(prompt, model, prophet, max_tokens=TOKENS, **arguments(**SETTINGS[name])) == plain

    @pytest.mark.parametrize("name", SETTINGS)
    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_prompt_lookup(self, name, prompt):
        for model in MODELS:
            plain = list(generate_step(prompt, model, max_tokens=TOKENS, **arguments(**SETTINGS[name])))
            lookup = PromptLookup(5)
            assert tokens_of(prompt, model, lookup, max_tokens=TOKENS, **arguments(**SETTINGS[name])) == plain

    @pytest.mark.parametrize("name", ["greedy", "penalty"])
    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_draft_model(self, name, prompt):
        for model in MODELS:
            plain = list(generate_step(prompt, model, max_tokens=TOKENS, **arguments(**SETTINGS[name])))
            for draft_model in (model, OTHER):
                drafter = ModelDrafter(draft_model)
                assert tokens_of(prompt, model, drafter, max_tokens=TOKENS, **arguments(**SETTINGS[name])) == plain
                assert drafter.acceptance.proposed > 0
                if draft_model is model:  # the penalty included: its drafts are the model's own choice
                    assert drafter.acceptance.rate == 1

    def test_a_sampler_of_ones_own_with_a_draft_model(self):
        def second(logprobs):
            return mx.argsort(-logprobs, axis=-1)[:, 1]

        plain = list(generate_step([1, 5], MODELS[0], max_tokens=TOKENS, sampler=second))
        assert tokens_of([1, 5], MODELS[0], ModelDrafter(OTHER), max_tokens=TOKENS, sampler=second) == plain

    @pytest.mark.parametrize("chunk", [1, 3, 39])
    def test_prefill_in_chunks(self, chunk):
        plain = list(generate_step(PROMPTS[3], MODELS[0], max_tokens=8))
        prophet = Prophet(plain)
        assert tokens_of(PROMPTS[3], MODELS[0], prophet, max_tokens=8, prefill_step_size=chunk) == plain

    def test_a_rotating_cache(self):
        """Drafts end where the cache begins to overwrite; the text goes on."""
        model = MODELS[1]
        plain = list(generate_step(PROMPTS[0], model, max_tokens=TOKENS, cache=make_cache(model, max_kv_size=16)))
        prophet = Prophet(plain, mistakes=0.1)
        cache = make_cache(model, max_kv_size=16)
        assert tokens_of(PROMPTS[0], model, prophet, max_tokens=TOKENS, cache=cache) == plain
        assert 0 < prophet.acceptance.proposed < 16

    def test_an_array_is_a_prompt_too(self):
        prompt = mx.array(PROMPTS[0])
        plain = list(generate_step(prompt, MODELS[0], max_tokens=5))
        assert tokens_of(prompt, MODELS[0], Prophet(plain), max_tokens=5) == plain


class TestDistribution:
    """With a draft model and a temperature the tokens of a seed change, their distribution does not."""

    WANTED = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    DRAWN_FROM = np.array([[0.2, 0.2, 0.3, 0.3], [0.4, 0.3, 0.2, 0.1]])

    def test_accept_or_redraw(self):
        """Two drafts over four tokens: each place has the wanted frequencies."""
        with np.errstate(divide="ignore"):
            wanted, drawn_from = (mx.array(np.log(p), dtype=mx.float32) for p in (self.WANTED, self.DRAWN_FROM))
        keys = mx.random.split(mx.random.key(3), 2 * 1500)
        texts = []
        for draft_key, check_key in zip(keys[::2], keys[1::2], strict=True):
            drafts = mx.random.categorical(drawn_from, key=draft_key)
            accepted, following = accept_or_redraw(drafts, drawn_from, wanted, check_key)
            texts.append([*drafts.tolist()[: accepted.item()], following.item()])
        for place in range(3):  # whatever came before, if it was accepted
            check_frequencies(np.bincount([t[place] for t in texts if len(t) > place], minlength=4), self.WANTED[place])

    def test_equal_distributions_accept_everything(self):
        same = mx.log(mx.array(self.WANTED[1:], dtype=mx.float32))
        for key in mx.random.split(mx.random.key(0), 50):
            accepted, _ = accept_or_redraw(mx.array([3]), same[:1], same, key)
            assert accepted.item() == 1

    def test_rounding_lets_no_forbidden_token_in(self):
        """A draft rejected although `wanted` exceeds `drawn_from` nowhere: what follows is still a wanted token."""
        drawn_from, wanted = mx.array([[-mx.inf, 0.0]]), mx.array([[-mx.inf, -2.0], [-mx.inf, 0.0]])
        for key in mx.random.split(mx.random.key(0), 20):
            _, following = accept_or_redraw(mx.array([1]), drawn_from, wanted, key)
            assert following.tolist() == [1]

    @pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}], ids=str)
    def test_whole_texts(self, filters):
        """A Markov chain drafted by another one: each token is followed by each other as often as it should be."""
        chain, drafter = Chain(seed=1), ModelDrafter(Chain(seed=2), 3)
        sampler = make_sampler(temp=0.8, seed=11, **filters)
        text = tokens_of([0], chain, drafter, max_tokens=800, sampler=sampler)
        assert 0.2 < drafter.acceptance.rate < 0.8
        expected = np.exp(np.array(sampler.filtered_logprobs(chain.logprobs)))
        for token in range(5):
            following = [after for before, after in pairwise(text) if before == token]
            check_frequencies(np.bincount(following, minlength=5), expected[token])

    def test_a_model_that_drafts_for_itself_is_always_right(self):
        drafter, sampler = ModelDrafter(Chain(seed=1)), make_sampler(0.8, top_p=0.7, seed=1)
        assert len(tokens_of([0], Chain(seed=1), drafter, max_tokens=60, sampler=sampler)) == 60
        assert drafter.acceptance.rate == 1

    def test_a_seed_gives_its_text_again(self):  # fault D14
        one, again, two = (
            tokens_of([1, 4], MODELS[0], ModelDrafter(OTHER), max_tokens=20, sampler=make_sampler(1.0, seed=seed))
            for seed in (1, 1, 2)
        )
        assert one == again != two


class TestCaches:
    @pytest.mark.parametrize("drafter", ["prophet", "model"])
    @pytest.mark.parametrize("given", range(1, 12))
    def test_closed_at_any_token(self, drafter, given):
        """The cache holds what was handed out, perhaps but the last token, and goes on as a fresh run would."""
        model, prompt, cache = MODELS[0], PROMPTS[0], MODELS[0].make_cache()
        plain = list(generate_step(prompt, model, max_tokens=TOKENS))
        drafter = Prophet(plain, given, 0.2) if drafter == "prophet" else ModelDrafter(OTHER)
        running = speculative_step(prompt, model, drafter, max_tokens=TOKENS, cache=cache)
        text = prompt + [next(running).token for _ in range(given)]
        running.close()
        offsets = {layer.offset for layer in cache}
        assert offsets <= {len(text), len(text) - 1}
        (held,) = offsets
        rest = [*text[held:], 3]
        logits, fresh = model(mx.array([rest]), cache)[0, -1], model(mx.array([[*text, 3]]))[0, -1]
        assert mx.abs(logits - fresh).max() < 1e-4

    def test_an_interrupted_pass_leaves_no_layer_ahead(self):  # fault D8
        model, cache = build(0, num_transformer_layers=3), MODELS[0].make_cache()
        prophet = Prophet(list(generate_step([1, 5], model, max_tokens=TOKENS)), mistakes=0)
        running = speculative_step([1, 5], model, prophet, max_tokens=TOKENS, cache=cache)
        given = [next(running) for _ in range(3)]

        def interrupt(*_):
            raise KeyboardInterrupt

        model.layers[1].ffn.proj_2 = interrupt
        with pytest.raises(KeyboardInterrupt):
            given += running
        offsets = {layer.offset for layer in cache}
        assert len(offsets) == 1
        assert offsets <= {1 + len(given), 2 + len(given)}

    def test_all_tokens_and_no_more_are_fed(self):
        """As in plain decoding: all but the last, whatever the drafts; never a position beyond it."""
        for limit in range(8):
            for seed in range(2):
                cache, fed = MODELS[0].make_cache(), []

                def spy(tokens, cache, last_only=False, fed=fed):
                    fed.append(cache[0].offset + tokens.shape[1])
                    return MODELS[0](tokens, cache, last_only=last_only)

                spy.config = MODELS[0].config
                prophet = Prophet(list(generate_step([1, 5], MODELS[0], max_tokens=20)), seed)
                assert len(tokens_of([1, 5], spy, prophet, max_tokens=limit, cache=cache)) == limit
                assert max(fed, default=0) <= 2 + limit
                assert cache[0].offset == (1 + limit if limit else 0)

    def test_a_draft_model_follows_a_chat(self):
        """Turns of one text, cut back between them as a chat does: a model that drafts for itself is always right."""
        model, cache, drafter = MODELS[0], MODELS[0].make_cache(), ModelDrafter(MODELS[0])
        text = []
        for turn, back in (([1, 5, 9], 0), ([7, 7], 0), ([30, 2], 6), ([8], 2)):
            for layer in cache:
                layer.trim(back)
            del text[cache[0].offset :]
            text += turn
            new = text[cache[0].offset :]
            running = speculative_step(new, model, drafter, max_tokens=30, cache=cache)
            made = [next(running).token for _ in range(7)]
            running.close()
            assert made == list(generate_step(text, model, max_tokens=7))
            assert drafter.acceptance.proposed == drafter.acceptance.accepted > 0
            text += made

    def test_a_cache_that_the_drafter_never_saw(self):
        """Read from a file, say: the drafter knows the new part only, and the text is the model's all the same."""
        model, cache = MODELS[0], MODELS[0].make_cache()
        model(mx.array([PROMPTS[3]]), cache)
        plain = list(generate_step([*PROMPTS[3], 4, 6], model, max_tokens=8))
        assert tokens_of([4, 6], model, ModelDrafter(OTHER), max_tokens=8, cache=cache) == plain

    @pytest.mark.parametrize("seed", range(3))
    def test_rejections_leave_no_trace_in_the_draft_models_cache(self, seed):
        """After each draft, right or wrong, it proposes what a fresh one proposes for the same text."""
        drafter, chance = ModelDrafter(OTHER, 4), random.Random(seed)
        drafter.begin(0, PROMPTS[0])
        for _ in range(8):
            fresh = ModelDrafter(OTHER, 4)
            fresh.begin(0, drafter.text)
            expected = fresh.propose(4, None, []).tokens.tolist()
            assert drafter.propose(4, None, []).tokens.tolist() == expected
            drafter.learn([*expected[: chance.randint(0, 4)], chance.randrange(VOCAB)], 4, 0.0)


class TestRunningAhead:
    def test_plain_decoding_is_a_step_ahead_unless_a_draft_may_come(self):
        class Never(Drafter):
            def expects(self):
                return False

            def propose(self, *_):
                raise AssertionError("asked for a draft that it said would not come")

        class Maybe(Drafter):
            def propose(self, *_):
                return None

        for drafter, ahead in ((Never(1), 1), (Maybe(1), 0)):
            chain = Chain(seed=1)
            running = speculative_step([0, 1, 2], chain, drafter, max_tokens=5)
            calls = []
            for _ in running:
                calls.append(len(chain.fed))
            assert chain.fed == [3, 1, 1, 1, 1]
            assert calls == [min(made + ahead, 5) for made in range(1, 6)]

    def test_the_first_token_does_not_wait_for_the_draft_model(self):
        drafter = ModelDrafter(Chain(seed=1))
        running = speculative_step([0, 1], Chain(seed=2), drafter, max_tokens=9)
        next(running)
        assert drafter.model.fed == []
        next(running)
        assert drafter.model.fed == [3, 1, 1]  # the prompt and the first token, then its own drafts but the last

    def test_accepted_drafts_are_not_fed_to_the_draft_model_again(self):
        drafter = ModelDrafter(Chain(seed=1))
        assert len(tokens_of([0, 1], Chain(seed=1), drafter, max_tokens=9)) == 9
        assert drafter.model.fed == [3, 1, 1, 2, 1, 1]  # the last draft and the token after it: both are new to it


class TestRequests:
    def test_what_came_from_a_draft_is_marked(self):
        plain = list(generate_step([1, 5], MODELS[0], max_tokens=12))
        prophet = Prophet(plain, mistakes=0.1)
        drafted = list(speculative_step([1, 5], MODELS[0], prophet, max_tokens=12))
        assert sum(token.from_draft for token in drafted) == prophet.acceptance.accepted > 0
        assert prophet.acceptance.rate == prophet.acceptance.accepted / prophet.acceptance.proposed < 1

    def test_the_errors_of_generate_step(self):
        with pytest.raises(GenerationError, match="empty"):
            speculative_step([], MODELS[0], PromptLookup(2))
        with pytest.raises(TokenizerError, match="64"):
            speculative_step([1, 64], MODELS[0], PromptLookup(2))

    @pytest.mark.parametrize("make", [PromptLookup, lambda count: ModelDrafter(OTHER, count)])
    def test_fewer_than_one_draft_token(self, make):
        with pytest.raises(GenerationError, match="1 or more, got 0"):
            make(0)
