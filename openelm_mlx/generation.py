"""Generation: token ids in, token ids out (`generate_step`); text, time and stop strings one layer up.

`generate_step -> stream_generate -> generate`, with mlx-lm's names, so that habits carry over.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from .cache import KVCache
from .config_keys import counted
from .device import wired_limit
from .errors import GenerationError, RunFailedError
from .model import Model
from .sampling import LogitsProcessor, Sampler, log_softmax
from .stopping import StopStrings
from .tokenizer import Tokenizer, check_ids

if TYPE_CHECKING:
    from .decoder import Decoder
    from .drafts import Drafter

DEFAULT_MAX_TOKENS = 256
PREFILL_STEP_SIZE = 2048
_CLEAR_CACHE_EVERY = 256  # tokens; freed buffers would otherwise pile up over a long text


@dataclass(frozen=True)
class GenerationResponse:
    """One generated token. Rates are tokens/s so far; `finish_reason` is None, "stop" or "length"."""

    text: str
    token: int
    finish_reason: str | None
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float  # tokens after the first, over the time since the first
    ttft_s: float
    peak_memory_bytes: int  # of MLX's allocator, since this generation began
    from_draft: bool = False  # whether a drafter had guessed this token

    @property
    def peak_memory(self) -> float:
        """Peak memory in GB, under mlx-lm's name."""
        return self.peak_memory_bytes / 1e9


def generate_step(
    prompt: Sequence[int] | mx.array,
    model: Model,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    cache: list[KVCache] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    decoder: "Decoder | str | None" = None,
) -> Iterator[int]:
    """Yield up to `max_tokens` token ids that continue `prompt`. Knows no text, no EOS and no context limit.

    The whole prompt is prefilled in one pass (chunks of `prefill_step_size` above that), with logits at its last
    position only. The first token is handed out as soon as it is there; from the second on each step is queued before
    the token before it is handed out, so the device works while the caller prints.

    sampler: log-probabilities (1, V) -> tokens (1,); None is greedy. cache: continued from, and updated in place.
    decoder: how a step is computed, eager or compiled; None takes what was measured to be faster (see `decoder`).
    Raises GenerationError for an empty prompt, TokenizerError for an id outside the vocabulary.
    """
    ids = list(cast(list[int], prompt.tolist()) if isinstance(prompt, mx.array) else prompt)
    if not ids:
        raise GenerationError("the prompt is empty: give at least one token")
    check_ids(ids, model.config.vocab_size)
    held = cache or model.make_cache()
    return _steps(ids, model, max_tokens, sampler, logits_processors, held, prefill_step_size, decoder)


def _steps(
    ids: list[int],
    model: Model,
    max_tokens: int,
    sampler: Sampler | None,
    logits_processors: Sequence[LogitsProcessor],
    cache: list[KVCache],
    prefill_step_size: int,
    decoder: "Decoder | str | None",
) -> Iterator[int]:
    tokens = mx.array(ids)
    seen = tokens

    def choose(logits: mx.array) -> mx.array:
        """The token (1,) that these logits (1, V) lead to, not evaluated."""
        nonlocal seen
        for process in logits_processors:
            logits = process(seen, logits)
        token = mx.argmax(logits, axis=-1) if sampler is None else sampler(log_softmax(logits))
        if logits_processors:
            seen = mx.concatenate([seen, token])
        return token

    if max_tokens < 1:
        return
    tokens = prefill(model, tokens, cache, prefill_step_size)
    logits = model(tokens[None], cache, last_only=True)[:, -1]  # (1, L) -> (1, 1, V) -> (1, V)
    damaged = mx.any(mx.isnan(logits))
    token = choose(logits)
    mx.eval(token, damaged)
    if damaged.item():  # the likeliest of no numbers is token 0, <unk>, for ever
        raise RunFailedError("the model's logits are not numbers: its weights are damaged, or too large for this dtype")
    yield cast(int, token.item())  # a person waits for it, and a CPU is busy with the next step before it is all queued
    if max_tokens == 1:
        return
    from .decoder import Decoder  # not needed any earlier

    decode = decoder if isinstance(decoder, Decoder) else Decoder(model, cache, max_tokens - 1, decoder)
    token = choose(decode(token))
    mx.async_eval(token)
    for count in range(2, max_tokens + 1):
        following = choose(decode(token)) if count < max_tokens else None
        if following is not None:
            mx.async_eval(following)
        yield cast(int, token.item())
        if following is not None:
            token = following
        if count % _CLEAR_CACHE_EVERY == 0:
            mx.clear_cache()


def prefill(model: Model, tokens: mx.array, cache: list[KVCache], step_size: int = PREFILL_STEP_SIZE) -> mx.array:
    """Run all of a prompt's tokens (L,) but the last chunk through the model; return that chunk, not run."""
    while len(tokens) > step_size:
        model.transformer(tokens[None, :step_size], cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
        tokens = tokens[step_size:]
    return tokens


def stream_generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    max_tokens: int | None = None,
    *,
    stop: Sequence[str] = (),
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    cache: list[KVCache] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    drafter: "Drafter | None" = None,
    decoder: "Decoder | str | None" = None,
    exceed_context: bool = False,
) -> Iterator[GenerationResponse]:
    """Continue `prompt` (text, encoded with BOS, or ids); yield one response for each token.

    The joined `.text` is the continuation, without EOS and without the stop string that ended it. `max_tokens` None
    means 256, or what the context has room for. `drafter` guesses tokens ahead (see `speculative`), `decoder` says
    how a step is computed (see `decoder`). Errors are raised by the call itself, before any work.
    Raises GenerationError when prompt and max_tokens do not fit into the context (unless `exceed_context`).
    """
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    held = cache[0].offset if cache else 0
    limit = room_for(held + len(ids), max_tokens, model.config.max_context_length, exceed_context)
    settings: dict[str, Any] = {
        "max_tokens": limit,
        "sampler": sampler,
        "logits_processors": logits_processors,
        "cache": cache,
        "prefill_step_size": prefill_step_size,
    }
    if drafter is None:
        plain = generate_step(ids, model, decoder=decoder, **settings)
        tokens: Iterator[tuple[int, bool]] = ((token, False) for token in plain)
    else:
        from .speculative import speculative_step  # which builds on this module

        steps = speculative_step(ids, model, drafter, **settings)
        tokens = ((step.token, step.from_draft) for step in steps)
    models = [model] if drafter is None or drafter.model is None else [model, drafter.model]
    return _responses(sum(map(weight_bytes, models)), tokenizer, tokens, len(ids), limit, StopStrings(stop))


def _responses(
    model_bytes: int,
    tokenizer: Tokenizer,
    tokens: Iterator[tuple[int, bool]],
    prompt_tokens: int,
    limit: int,
    stops: StopStrings,
) -> Iterator[GenerationResponse]:
    detokenizer = tokenizer.detokenizer()
    mx.reset_peak_memory()
    with wired_limit(model_bytes):
        start = time.perf_counter()
        ttft_s = 0.0
        for count, (token, from_draft) in enumerate(tokens, 1):
            now = time.perf_counter()
            if count == 1:
                ttft_s, first = now - start, now
            ended = token in tokenizer.eos_token_ids
            text = stops.feed("" if ended else detokenizer.add(token))
            done = ended or stops.stopped or count == limit
            if done and not stops.stopped:
                text += stops.feed(detokenizer.finish()) + stops.finish()
            yield GenerationResponse(
                text=text,
                token=token,
                finish_reason=None if not done else "stop" if ended or stops.stopped else "length",
                prompt_tokens=prompt_tokens,
                prompt_tps=_rate(prompt_tokens, ttft_s),
                generation_tokens=count,
                generation_tps=_rate(count - 1, now - first),
                ttft_s=ttft_s,
                peak_memory_bytes=mx.get_peak_memory(),
                from_draft=from_draft,
            )
            if done:
                return


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    max_tokens: int | None = None,
    **settings: Any,
) -> str:
    """The whole continuation of `prompt` as one string; the settings are those of `stream_generate`."""
    return "".join(response.text for response in stream_generate(model, tokenizer, prompt, max_tokens, **settings))


def room_for(prompt_tokens: int, max_tokens: int | None, context: int, exceed: bool) -> int:
    """How many tokens to generate: as asked, or up to the default where nothing was asked.

    Raises GenerationError with the numbers when that does not fit into a context of `context` tokens.
    """
    if max_tokens is not None and max_tokens < 1:
        raise GenerationError(f"max_tokens must be 1 or more, got {max_tokens}")
    room = context - prompt_tokens
    if exceed:
        return max_tokens or DEFAULT_MAX_TOKENS
    if room < 1:
        raise GenerationError(
            f"the prompt has {counted(prompt_tokens, 'token')} and the model's context is {context}: shorten the "
            "prompt, or go beyond what the model was trained for with --exceed-context"
        )
    if max_tokens is not None and max_tokens > room:
        raise GenerationError(
            f"{prompt_tokens} prompt tokens and {max_tokens} to generate exceed the model's context of {context}: "
            f"ask for at most {room}, or go beyond what the model was trained for with --exceed-context"
        )
    return min(max_tokens or DEFAULT_MAX_TOKENS, room)


def weight_bytes(model: Model) -> int:
    """Bytes of the model's parameters as they are held."""
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    return sum(value.nbytes for _, value in parameters)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
