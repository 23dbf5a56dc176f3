"""The keys and values of a prompt in a file, so that a long beginning is computed once. The layout is mlx-lm's.

    save_prompt_cache(path, cache, ids, model)
    cache, ids = load_prompt_cache(path, model)
    rest = rest_of_prompt(cache, ids, prompt, tokenizer)     # what of `prompt` is still to be run

A file is safetensors. `prompt_cache_layers` has its arrays; of its metadata, `0.*` is the user's, `1.*` names each
layer's class, and `2.*` the arrays that are numbers. We add the prompt's ids, and a fingerprint of the model.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .atomic_file import check_file_target, new_file
from .cache import KVCache
from .errors import CheckpointError, GenerationError, OutputError
from .model import Model
from .prompt_cache_layers import StoredLayer, layer_state
from .safetensors_file import read_header, read_metadata
from .tokenizer import Tokenizer

SUFFIX = ".safetensors"
_SAMPLES = 16  # numbers of each parameter that the fingerprint looks at
_AGAIN = "make it again with `openelm cache-prompt`"


def save_prompt_cache(
    path: Path, cache: Sequence[KVCache], ids: Sequence[int], model: Model, *, model_name: str = ""
) -> None:
    """Write what `cache` holds after `ids`, for `load_prompt_cache` and for mlx-lm. Raises OutputError."""
    assert {layer.offset for layer in cache} == {len(ids)}, "the cache is not that of these ids"
    check_prompt_cache_target(path)
    state = {f"{i}.{place}": value for i, layer in enumerate(cache) for place, value in layer_state(layer).items()}
    metadata = {
        "0.model": model_name.encode(errors="replace").decode(),
        "0.tokenizer_config": "{}",  # mlx_lm.generate wants these two
        "0.ids": json.dumps(list(ids)),
        "0.fingerprint": fingerprint(model),
        "2.0": "",
    }
    metadata |= {f"1.{i}": type(layer).__name__ for i, layer in enumerate(cache)}
    for i, name in enumerate((name for name, value in state.items() if isinstance(value, int)), start=1):
        metadata |= {f"2.{i}.0": name, f"2.{i}.1": "scalar"}
    arrays = {name: mx.array(value) if isinstance(value, int) else value for name, value in state.items()}
    with new_file(path) as partial:
        try:
            mx.save_safetensors(str(partial), arrays, metadata)
        except RuntimeError:
            raise OutputError(f"cannot write {path}: is the disk full? nothing was changed") from None


def check_prompt_cache_target(path: Path) -> None:
    """Raise OutputError, before the work, unless `path` can be written and is free, or a prompt cache already."""
    if path.suffix != SUFFIX:
        raise OutputError(f"{path} must end in {SUFFIX}: mlx-lm reads no other prompt cache")
    check_file_target(path)
    if path.exists() and not _is_prompt_cache(path):
        raise OutputError(f"{path} exists and is no prompt cache, so it is not replaced; choose another name")


def load_prompt_cache(path: Path, model: Model) -> tuple[list[KVCache], list[int] | None]:
    """A file's cache, one for each layer, and the ids it holds: None where mlx-lm wrote it, which keeps no ids.

    Raises CheckpointError, in one line, for a file that is damaged, no prompt cache, or another model's.
    """
    tensors, metadata = read_header(path), read_metadata(path)
    kinds = _kinds(metadata)
    if not kinds:
        raise CheckpointError(f"{path} is no prompt cache; make one with `openelm cache-prompt`")
    if len(kinds) != len(model.layers):
        raise CheckpointError(
            f"{path} is of a model of {len(kinds)} layers, this one has {len(model.layers)}: {_AGAIN}"
        )
    if metadata.get("0.fingerprint", wanted := fingerprint(model)) != wanted:
        raise CheckpointError(
            f"{path} was made with other weights, adapter or quantisation, by the name of "
            f"{metadata.get('0.model')!r:.80}: load that model, or {_AGAIN}"
        )
    layers = [StoredLayer(path, i, tensors, keys) for i, keys in enumerate(_keys_of(model))]
    cache = [layer.read(kind) for layer, kind in zip(layers, kinds, strict=True)]
    foreign = set(tensors).difference(*(layer.names_read for layer in layers))
    if foreign:
        raise CheckpointError(f"{path} holds {min(foreign)!r:.80}, which is no part of a prompt cache: {_AGAIN}")
    if len({layer.offset for layer in cache}) > 1:
        raise CheckpointError(f"{path} has layers of different lengths: {_AGAIN}")
    return cache, _ids(path, metadata, cache[0].offset, model.config.vocab_size)


def rest_of_prompt(
    cache: Sequence[KVCache], ids: Sequence[int], prompt: Sequence[int], tokenizer: Tokenizer
) -> list[int]:
    """What of `prompt` is still to be run, one id at least; the cache, which holds `ids`, is trimmed accordingly.

    Trimmed, because the last word may be cut into other pieces when text follows. Raises GenerationError when the
    prompt does not begin with the text that the cache holds, or a trim is needed and impossible.
    """
    if not tokenizer.decode(prompt).startswith(tokenizer.decode(ids)):
        raise GenerationError(
            f"the prompt does not begin with the {len(ids)} tokens of the prompt cache "
            f"({tokenizer.decode(ids)[:40]!r}...): give the whole text, beginning included"
        )
    differing = (i for i, (one, other) in enumerate(zip(ids, prompt, strict=False)) if one != other)
    shared = min(next(differing, len(ids)), len(ids), len(prompt) - 1)
    for layer in cache:
        layer.trim(len(ids) - shared)
    return list(prompt[shared:])


def fingerprint(model: Model) -> str:
    """A hash of the configuration and of some numbers of each parameter, adapters included.

    It is the same in every dtype that holds the same numbers: bfloat16, and the same read as float32.
    """
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    samples = {name: _sample(value) for name, value in sorted(parameters)}
    mx.eval(samples)
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, sample in samples.items():
        digest.update(name.encode() + np.array(sample).tobytes())
    return digest.hexdigest()


def _sample(value: mx.array) -> mx.array:
    flat = value.reshape(-1)[:: max(1, value.size // _SAMPLES)]
    return flat.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else flat


def _keys_of(model: Model) -> list[mx.array]:
    """Each layer's keys as the model makes them. Only their shapes and dtypes are looked at: nothing is computed."""
    cache = model.make_cache()
    model(mx.array([[0]]), cache)
    return [cast(mx.array, layer.keys) for layer in cache]


def _kinds(metadata: Mapping[str, str]) -> list[str]:
    """Each layer's class name; none where the file is something else."""
    count = sum(name.startswith("1.") for name in metadata)
    names = [metadata.get(f"1.{i}", "") for i in range(count)]
    return names if "2.0" in metadata else []


def _is_prompt_cache(path: Path) -> bool:
    try:
        return bool(_kinds(read_metadata(path)))
    except CheckpointError:
        return False


def _ids(path: Path, metadata: Mapping[str, str], count: int, vocab_size: int) -> list[int] | None:
    if "0.ids" not in metadata:
        return None
    try:
        ids = json.loads(metadata["0.ids"])
    except (ValueError, RecursionError):
        ids = None
    if (
        not isinstance(ids, list)
        or len(ids) != count
        or not all(type(token) is int and 0 <= token < vocab_size for token in ids)
    ):
        raise CheckpointError(f"{path} does not say which {count} tokens it holds: {_AGAIN}")
    return ids
