"""Does llama.cpp compute from our GGUF files what we compute? Logits, greedy text and token ids, side by side.

    pip install 'openelm-mlx[gguf]' llama-cpp-python
    python -m openelm_mlx.benchmarks.llama_cpp_agreement --model tiny

Exports MODEL with every GGUF type, and prints a table. Status 1 when float32 does not agree: a logit further away than
`--tolerance`, another token in the greedy text, or any other token id. The other types round, and are only reported.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..checkpoint import load
from ..errors import ConfigError, OpenELMError, RunFailedError
from ..generation import generate_step
from ..model import Model
from ..prompt import encode_chat
from ..tokenizer import Tokenizer

_TYPES = ("F32", "F16", "BF16", "Q8_0")
_FLOAT32 = 0  # ggml's number of the type: llama.cpp's cache is float16 by default
_PROMPTS = ("Once upon a time there was a king who", '"Where are you going?" asked the wolf.\n\n')
_TEXTS = (
    "", " ", "  ", "\n", "\n\n \n", " leading", "   three leading", "trailing ", "two  spaces   three",
    "tab\tand\r\nreturn", "It was 1883; 12345 pieces of eight, $0.50.", "don't \"quote\" 'em -- or -- do...",
    "CamelCase snake_case https://example.org/?q=a+b", "def f(x):\n    return x ** 2\n", "🙂é世", "👩‍👩‍👧 🇫🇷",
    "e\u0301 differs from é", "ﬁ ½ Å ™ \u00a0 \u3000 \u200d", "Ελλάδα, мир, שלום, 日本語", "\ufffd replacement",
    "a" * 41, "<|system|>\n<|user|>\n<|assistant|>\n", "</s>", "<s>Once upon a time", "<0x41>",
)  # fmt: skip
OtherIds = tuple[str, list[int], list[int]]  # a text, our ids, llama.cpp's


@dataclass(frozen=True)
class Agreement:
    """How far one GGUF type is from our float32 model. `kl` in nats a token, `greedy` how many tokens are the same."""

    type: str
    nbytes: int
    difference: float
    kl: float
    greedy: list[int]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder or Hub id (tiny)")
    parser.add_argument("--max-tokens", type=int, default=40, help="length of the greedy texts (40)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of a float32 logit (0.0001)")
    args = parser.parse_args(argv)
    try:
        return _compare(args)
    except OpenELMError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def _compare(args: argparse.Namespace) -> int:
    llama = _library()
    model, tokenizer = load(args.model, dtype="float32")
    prompts = [tokenizer.encode(text) for text in _PROMPTS]
    ours = [_our_logits(model, ids) for ids in prompts]
    texts = [_our_greedy(model, ids, args.max_tokens) for ids in prompts]
    found: list[Agreement] = []
    other_ids: list[OtherIds] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in _TYPES:
            file = _export(args.model, kind, Path(folder))
            theirs = _open(llama, file, model.config.max_context_length)
            found.append(_agreement(kind, file, theirs, prompts, ours, texts))
            if not other_ids:
                other_ids = _other_ids(theirs, tokenizer)
            theirs.close()
    print(_table(found, args.max_tokens))
    print(f"\ntoken ids: {len(_TEXTS) + 1 - len(other_ids)} of {len(_TEXTS) + 1} texts the same")
    for text, one, other in other_ids:
        print(f"  {text!r}: ours {one}, llama.cpp's {other}")
    exact = found[0]
    agrees = exact.difference <= args.tolerance and min(exact.greedy) == args.max_tokens and not other_ids
    return 0 if agrees else 1


def _library() -> Any:
    try:
        return import_module("llama_cpp")
    except ImportError:
        raise ConfigError("this comparison needs llama.cpp; pip install llama-cpp-python") from None


def _export(model: str, kind: str, folder: Path) -> Path:
    file = folder / f"{kind}.gguf"
    command = [sys.executable, "-m", "openelm_mlx", "export", model, "--to", "gguf", "-o", str(file)]
    done = subprocess.run([*command, "--gguf-type", kind], capture_output=True, text=True)
    if done.returncode:
        raise RunFailedError(f"openelm export failed: {done.stderr.strip()}")
    return file


def _open(llama: Any, file: Path, context: int) -> Any:
    logging.getLogger("llama_cpp").setLevel(logging.ERROR)
    return llama.Llama(
        str(file), n_ctx=context, logits_all=True, verbose=False, n_threads=2, type_k=_FLOAT32, type_v=_FLOAT32
    )


def _our_logits(model: Model, ids: list[int]) -> np.ndarray:
    return np.array(model(mx.array([ids]))[0].astype(mx.float32))


def _our_greedy(model: Model, ids: list[int], count: int) -> list[int]:
    return list(generate_step(ids, model, max_tokens=count))


def _their_logits(theirs: Any, ids: list[int]) -> np.ndarray:
    theirs.reset()
    theirs.eval(ids)
    return np.array(theirs.scores[: len(ids)])


def _their_greedy(theirs: Any, ids: list[int], count: int) -> list[int]:
    theirs.reset()
    text, new = [], ids
    for _ in range(count):
        theirs.eval(new)
        new = [int(theirs.scores[theirs.n_tokens - 1].argmax())]
        text += new
    return text


def _agreement(
    kind: str, file: Path, theirs: Any, prompts: list[list[int]], ours: list[np.ndarray], texts: list[list[int]]
) -> Agreement:
    logits = [_their_logits(theirs, ids) for ids in prompts]
    same = []
    for ids, text in zip(prompts, texts, strict=True):
        pairs = zip(text, _their_greedy(theirs, ids, len(text)), strict=True)
        same.append(next((i for i, (one, other) in enumerate(pairs) if one != other), len(text)))
    return Agreement(
        kind,
        file.stat().st_size,
        max(float(np.abs(one - other).max()) for one, other in zip(ours, logits, strict=True)),
        float(np.mean([_kl(one, other) for one, other in zip(ours, logits, strict=True)])),
        same,
    )


def _kl(reference: np.ndarray, logits: np.ndarray) -> float:
    """Mean KL divergence of two arrays of logits (L, V), in nats a token."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (reference.astype(float), logits.astype(float)))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def _other_ids(theirs: Any, tokenizer: Tokenizer) -> list[OtherIds]:
    """Texts, and a chat prompt, that llama.cpp encodes otherwise."""
    pairs = [
        (text, tokenizer.encode(text), theirs.tokenize(text.encode(), add_bos=True, special=False)) for text in _TEXTS
    ]
    chat = encode_chat(tokenizer, [{"role": "user", "content": "Hello!"}])
    prompt = "<|system|>\n</s>\n<|user|>\nHello!</s>\n<|assistant|>\n"
    pairs.append((prompt, chat, theirs.tokenize(prompt.encode(), add_bos=True, special=True)))
    return [pair for pair in pairs if pair[1] != pair[2]]


def _table(found: list[Agreement], count: int) -> str:
    lines = [
        "| type | bytes | largest difference of a logit | KL, nats a token | greedy tokens the same |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        greedy = ", ".join(f"{same} of {count}" for same in one.greedy)
        lines.append(f"| {one.type} | {one.nbytes:,} | {one.difference:.2g} | {one.kl:.2g} | {greedy} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
