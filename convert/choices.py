"""What is to become of a source before it is written: an adapter beside it, packed weights, several of one training.

Nothing is decided silently. A file with an adapter names its three choices; packed weights stay as they are, byte for
byte, until `dequantize` unpacks them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config_keys import counted
from ..errors import CheckpointError, ConfigError
from ..hub import resolve_model
from ..quantize import matrices
from .apple_mlx import FORMAT as APPLE_MLX
from .averaging import average
from .measure import fixed_prompt, measure, source_logits
from .merged import merged, unties
from .progress import progress
from .sources import Source, open_source

if TYPE_CHECKING:
    from .conversion import Options

_UNTIED = (
    "the embedding is adapted, the output head is not, so the two are untied: mlx-lm and transformers (with Apple's "
    "code) load that, mlx-swift and llama.cpp do not (--fuse --tie leaves the embedding's adapter out)"
)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What to do with what a source holds besides one plain model.

    average_with: further checkpoints of the same training, to take the mean of. use_ema: the moving average in a
    training checkpoint. dequantize: unpack packed weights. fuse: merge a LoRA or DoRA checkpoint's adapter; tie: but
    not that of the embedding, so that the output head stays the embedding. adapter_path: write the adapter there, as a
    folder of its own beside the base model.
    """

    average_with: Sequence[str | Path] = ()
    use_ema: bool = False
    dequantize: bool = False
    fuse: bool = False
    tie: bool = False
    adapter_path: str | Path | None = None

    def check(self) -> None:
        """Raise ConfigError for choices that exclude each other."""
        if self.fuse and self.adapter_path is not None:
            raise ConfigError("--fuse merges the adapter, --adapter-path keeps it apart: choose one")
        if self.tie and not self.fuse:
            raise ConfigError("--tie is about a merged adapter: add --fuse")


def open_chosen(path: Path, options: "Options") -> Source:
    """The source at `path`, or its mean with the others."""
    config = None if options.config is None else Path(options.config)
    opened = open_source(path, config, use_ema=options.use_ema)
    if not options.average_with:
        return opened
    others = [resolve_model(str(name), offline=options.offline) for name in options.average_with]
    return average([opened, *(open_source(other, config, use_ema=options.use_ema) for other in others)])


def check_adapter(source: Source, options: "Options") -> None:
    """Raise unless what is asked of the adapter can be done, and is asked where there is one."""
    asked = options.fuse or options.adapter_path is not None
    if source.adapter is None and asked:
        flag = "--fuse" if options.fuse else "--adapter-path"
        raise ConfigError(f"{source.path} holds no adapter ({source.format}): leave {flag} out")
    if source.adapter is not None and not asked:
        facts = source.adapter
        name = {"lora": "LoRA", "dora": "DoRA"}[facts.kind]
        where = counted(len(facts.parts), "matrix", "matrices") + (
            ", the input embedding among them" if facts.embedding else ""
        )
        raise CheckpointError(
            f"{source.path} is a whole model with a {name} adapter (rank {facts.rank}, on {where}): choose --fuse "
            "to merge it, --fuse --tie to merge it without the embedding's part, or --adapter-path DIR to split it"
        )


def applied(source: Source, options: "Options") -> tuple[Source, str]:
    """What will be written, and the dtype: packed weights as they are, or unpacked, or merged.

    Without a dtype asked for, MLX's own files keep theirs and the others become bfloat16.
    """
    keeps = source.quantization is not None or source.format == APPLE_MLX
    dtype = options.dtype or (source.dtype if keeps else "bfloat16")
    if source.quantization is None:
        if options.dequantize:
            raise ConfigError(f"{source.path} is not quantized: leave --dequantize out")
        return (merged(source, tie=options.tie) if options.fuse else source), dtype
    if options.dequantize:
        return source.unpacked(), dtype
    if options.quantize or options.dtype is not None or options.measure:
        raise CheckpointError(
            f"{source.path} is already quantized ({source.quantization.default}): add --dequantize to unpack it "
            "first, or leave the options out to keep its numbers as they are"
        )
    return _with_every_module(source), dtype


def notes(source: Source, tokenizer: Path, options: "Options") -> tuple[str, ...]:
    """What is to be said about a merged adapter; `source` still has it beside the base."""
    if not (options.fuse and unties(source)):
        return ()
    if not options.tie:
        return (_UNTIED,)
    tokens = fixed_prompt(tokenizer, source.config)
    exact, tied = merged(source), merged(source, tie=True)
    with progress("measuring", 2 * source.nbytes) as tick:
        expected = source_logits(exact.tensors, exact.config, tokens, tick)
        found = measure(expected, tied.tensors, tied.config, None, "float32", tokens, tick)
    return (
        f"the embedding's adapter is left out: logits differ by up to {found.largest:.3g}, "
        f"KL {found.kl:.2g} nats a token ({found.tokens} tokens)",
    )


def _with_every_module(source: Source) -> Source:
    """The quantisation recorded in full: matrices left unpacked are named, so that no reader has to guess."""
    assert source.quantization is not None
    packed = source.quantization.modules
    skipped = tuple(path for path in matrices(source.config) if path not in packed)
    return replace(source, quantization=replace(source.quantization, skipped=skipped))
