"""The model that goes out, from whatever it is now: plain tensors under Hub names, its tokenizer, what it is called."""

from dataclasses import dataclass, replace
from pathlib import Path

from ..atomic import check_apart
from ..checkpoint import is_instruct
from ..errors import CheckpointError, ConfigError
from ..hub import find_tokenizer, is_hub_id, resolve_model
from ..tensors import CODES
from .conversion import fit_vocabulary
from .options import FolderOptions
from .sources import Source, open_source, refuse_adapter


@dataclass(frozen=True, kw_only=True)
class ExportOptions(FolderOptions):
    """How to export.

    dtype: None keeps the model's own (of a quantised model: that of its scales). max_shard_bytes: no weight file is
    larger, unless one tensor is (hf and pt). pad_vocab: the vocabulary's rows are filled up to a multiple of it, 0 for
    not at all (corenet). Only hf can be uploaded.
    """

    max_shard_bytes: int = 5 * 10**9
    pad_vocab: int = 128


@dataclass(frozen=True)
class Exported:
    """A model opened for export; no value was read yet. `dtype` is MLX's name of the one to write."""

    name: str
    source: Source
    tokenizer: Path
    instruct: bool
    dtype: str
    base_model: str | None  # the Hub id that it was named by

    @property
    def pieces(self) -> int:
        """How many tokens the tokenizer has; the embedding may have more rows."""
        from ..tokenizer import Tokenizer

        return Tokenizer.from_path(self.tokenizer, vocab_size=self.source.config.vocab_size).vocab_size


def open_model(name: str, target: Path, options: ExportOptions, *, keep_padding: bool) -> Exported:
    """The model that `name` means (folder, file, Hub id or `tiny`), to be written to `target`.

    keep_padding: keep the rows that CoreNet pads a vocabulary with. Quantised matrices are unpacked as they are read,
    which is warned of. Raises CheckpointError for an adapter and for anything that is no model.
    """
    is_remote = is_hub_id(name)
    path = resolve_model(name, revision=options.revision, offline=options.offline)
    if path.is_dir() and not (path / "config.json").is_file():
        refuse_adapter(path)
    check_apart(target, path)
    source = open_source(path, None if options.config is None else Path(options.config))
    if source.adapter is not None:
        raise CheckpointError(
            f"{path} holds a model and an adapter beside it; convert it first (openelm convert), then export that"
        )
    size = source.config.vocab_size
    tokenizer = find_tokenizer(options.tokenizer, path, vocab_size=size, offline=options.offline)
    source = fit_vocabulary(source, tokenizer, keep_padding)
    dtype = source.dtype if options.dtype is None else options.dtype
    if dtype not in CODES:
        raise ConfigError(f"dtype must be bfloat16, float16 or float32; got {dtype!r}")
    instruct = is_instruct(name, source.folder) if options.instruct is None else options.instruct
    return Exported(name, _plain(source), tokenizer, instruct, dtype, name if is_remote else None)


def _plain(source: Source) -> Source:
    """The same model without quantisation: packed matrices become float32 as they are read."""
    if source.quantization is None:
        return source
    notice = (
        f"{source.path} is quantized ({source.quantization.default}): what is written are its unpacked values, "
        "rounded as quantization rounded them"
    )
    return replace(source.unpacked(), notices=(*source.notices, notice))
