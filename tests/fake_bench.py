"""A model whose time passes on its own clock, so that a benchmark's arithmetic can be held against known numbers."""

from contextlib import nullcontext
from types import SimpleNamespace

import mlx.core as mx

from openelm_mlx.benchmarks.measure import measure, session
from openelm_mlx.benchmarks.session import Method, Shape

EOS = 2
PROMPT = 8


class FakeModel:
    """Takes `prefill_s` for a prompt and `step_s` for a token, by its own clock, and always wants to end the text.

    slowness: how much slower each generation is, in order; the last one goes on.
    """

    def __init__(self, prefill_s=1.0, step_s=0.1, slowness=(1.0,), context=2048):
        self.config = SimpleNamespace(vocab_size=10, max_context_length=context, num_parameters=lambda: 4)
        self.prefill_s, self.step_s, self.slowness = prefill_s, step_s, list(slowness)
        self.now = 0.0
        self.shapes = []

    def __call__(self, tokens, cache, *, last_only):
        self.shapes.append(tokens.shape)
        is_prompt = tokens.shape[1] > 1
        if is_prompt and len(self.prompts) > 1 and len(self.slowness) > 1:
            self.slowness.pop(0)
        self.now += (self.prefill_s if is_prompt else self.step_s) * self.slowness[0]
        return mx.zeros((1, 1, 10)).at[0, 0, EOS].add(1)

    @property
    def prompts(self):
        return [shape for shape in self.shapes if shape[1] > 1]

    def clock(self):
        return self.now

    def make_cache(self):
        return []

    def parameters(self):
        return {"weight": mx.zeros((4,), dtype=mx.float16)}

    def modules(self):
        return []


def method(model, trials=2, clock=None, **settings):
    return Method(trials, clock=clock or model.clock, **settings)


def run(model, generation_tokens=11, trials=2, clock=None, progress=lambda step: None, **settings):
    shape = Shape(PROMPT, generation_tokens)
    return measure(model, "fake", shape, method(model, trials, clock, **settings), progress=progress)


def side(model, variant, events, trials=3):
    """A session that writes its turns down."""
    made = session(model, "fake", Shape(PROMPT, 3), method(model, trials), variant=variant)
    made.around = lambda: events.append(variant) or nullcontext()
    return made
