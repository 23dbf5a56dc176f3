"""Stand-ins for the tests of the chat: a model that says what it is told to, and a view that writes everything down."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from openelm_mlx.cache import KVCache
from openelm_mlx.model import Model

TINY = Path(__file__).parents[1] / "openelm_mlx" / "data" / "tiny"


class ScriptedModel:
    """Generates the given ids one after the other, EOS when they are used up, whatever it is asked."""

    def __init__(self, real: Model, ids):
        self.config, self.ids = real.config, list(ids)

    def __call__(self, new, cache, *, last_only):
        for layer in cache:
            layer.offset += new.shape[1]
        logits = mx.zeros((1, 1, self.config.vocab_size))
        logits[0, 0, self.ids.pop(0) if self.ids else 2] = 1.0
        return logits

    def make_cache(self):
        return [KVCache()]

    def parameters(self):
        return {}


class Recorder:
    """A view that only remembers; `stop_after` tokens it leaves an answer."""

    def __init__(self):
        self.shown, self.notices, self.errors, self.answers = [], [], [], []
        self.stop_after = None
        self.edited = None

    def show(self, text):
        self.shown.append(text)

    def notice(self, text):
        self.notices.append(text)

    def error(self, text):
        self.errors.append(text)

    def answer(self, prompt, responses):
        texts = []
        for response in responses:
            texts.append(response.text)
            if len(texts) == self.stop_after:
                break
        self.answers.append("".join(texts))

    def edit(self, text):
        self.edited = text
        return text + "!"


def answer_ids(tokenizer, text):
    """The ids of an answer as the model was trained to give it: what follows its header."""
    header = tokenizer.encode_segment("\n<|assistant|>\n")
    ids = tokenizer.encode_segment("\n<|assistant|>\n" + text)
    assert ids[: len(header)] == header
    return ids[len(header) :]


def say(conversation, text, max_tokens=6, *, replace=False, stop_after=None, **settings):
    """One turn; the prompt, and the tokens that came."""
    prompt = conversation.prepare(text, max_tokens=max_tokens, replace=replace)
    tokens = []
    answer = conversation.answer(prompt, max_tokens=max_tokens, **settings)
    for response in answer:
        tokens.append(response.token)
        if len(tokens) == stop_after:
            break
    answer.close()
    return prompt, tokens


def seen_logits(conversation, text, **options):
    """One turn through a conversation: the ids a processor saw, and the logits of the first token."""
    seen = []

    def spy(tokens, logits):
        seen.append((tokens.tolist(), np.array(logits[0])))
        return logits

    say(conversation, text, logits_processors=[spy], **options)
    return seen[0]


def check_like_fresh(conversation, text, **options):
    """The next answer's logits equal those of an empty cache on the same ids, and a processor sees all of these."""
    prompt = conversation.prepare(text, max_tokens=6, replace=options.get("replace", False))
    expected = np.array(conversation.model(mx.array([prompt.ids]))[0, -1])
    ids, logits = seen_logits(conversation, text, **options)
    assert ids == prompt.ids
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=1e-4)
    assert logits.argmax() == expected.argmax()
    return prompt
