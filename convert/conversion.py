"""Any OpenELM checkpoint in, an MLX model folder out: `convert(source, mlx_path)`.

Everything that can be refused is refused before the first byte is written. The weights then stream through
(streaming.py) into a hidden sibling of the target, are verified there (verify.py), and get their name last.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from ..atomic import check_space, check_target, new_folder
from ..checkpoint import is_instruct
from ..errors import CheckpointError, ConfigError, OutputError, TokenizerError
from ..hub import find_tokenizer, resolve_model
from ..quantize import Quantization, QuantizationSettings, plan
from ..safetensors_writer import PlannedTensor, SafetensorsWriter
from ..tensors import CODES
from ..tokenizer import Tokenizer
from .output import copy_extras, write_config, write_tokenizer
from .progress import progress
from .sources import Source, open_source
from .streaming import outputs, transformed
from .verify import check_copy, check_folder, check_forward

DTYPES = ("bfloat16", "float16", "float32")
_LARGE_MODEL_DIM = 3072  # 3B: its activations leave float16's range (apple/corenet mlx_examples/open_elm/README.md)
_MAX_PADDING_ROWS = 256  # CoreNet pads the vocabulary to a multiple of 128, the padding id included
_OTHER_FILES_BYTES = 8 * 2**20  # tokenizer, licence, configuration


@dataclass(frozen=True)
class ConversionSummary:
    """What was made. `nbytes` counts the weights; `seconds` everything, downloads included."""

    path: Path
    parameters: int
    bits_per_weight: float
    nbytes: int
    seconds: float
    dtype: str
    quantization: Quantization | None
    instruct: bool


def convert(
    source: str | Path,
    mlx_path: str | Path = "mlx_model",
    *,
    dtype: str = "bfloat16",
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str = "affine",
    embedding_bits: int = 8,
    tokenizer: str | None = None,
    config: str | Path | None = None,
    revision: str | None = None,
    force: bool = False,
    keep_vocab_padding: bool = False,
    instruct: bool | None = None,
    offline: bool = False,
) -> ConversionSummary:
    """Convert a folder, a file, a Hub id or `tiny` into the model folder `mlx_path`.

    dtype: of the unquantised weights, and of the scales. quantize: pack matrices with `q_bits` in groups of
    `q_group_size` (None: the mode's defaults), embeddings with `embedding_bits` (16: not at all).
    tokenizer: a file, folder or Hub id. config: a CoreNet YAML or a config.json, where the source has none.
    instruct: whether to write a chat template; None asks the source's name and its folder.
    Raises an OpenELMError with one line; the target then is as it was before.
    """
    started = time.perf_counter()
    settings = QuantizationSettings.of(q_mode, q_bits, q_group_size) if quantize else None
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be {', '.join(DTYPES)}; got {dtype!r}")
    target, name = Path(mlx_path).expanduser(), str(source)
    check_target(target, force=force)
    path = resolve_model(name, revision=revision, offline=offline)
    _check_apart(target, path)
    opened = open_source(path, None if config is None else Path(config))
    _check_unquantized(opened)
    _check_range(opened, dtype, force)
    found = find_tokenizer(tokenizer, path, vocab_size=opened.config.vocab_size, offline=offline)
    opened = _fit_vocabulary(opened, found, keep_vocab_padding)
    job = _Job.of(
        opened,
        found,
        is_instruct(name, opened.folder) if instruct is None else instruct,
        dtype,
        None if settings is None else _plan(opened, settings, embedding_bits),
    )
    job.run(target, force)
    return job.summary(target, time.perf_counter() - started)


@dataclass(frozen=True)
class _Job:
    """One model from its source into a folder."""

    source: Source
    tokenizer: Path
    instruct: bool
    dtype: str
    quantization: Quantization | None
    outputs: dict[str, list[PlannedTensor]]  # source tensor -> what is written for it

    @classmethod
    def of(
        cls, source: Source, tokenizer: Path, instruct: bool, dtype: str, quantization: Quantization | None
    ) -> "_Job":
        in_order = {name: source.tensors[name] for name in source.config.parameter_shapes()}
        return cls(source, tokenizer, instruct, dtype, quantization, outputs(in_order, dtype, quantization))

    @property
    def plan(self) -> list[PlannedTensor]:
        return [tensor for group in self.outputs.values() for tensor in group]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.plan)

    @property
    def is_copy(self) -> bool:
        """Whether no value changes."""
        dtypes = {tensor.dtype for tensor in self.source.tensors.values()}
        return self.quantization is None and dtypes == {CODES[self.dtype]}

    def run(self, target: Path, force: bool) -> None:
        """Write, verify, and only then give the folder its name."""
        check_space(target, self.nbytes + _OTHER_FILES_BYTES)
        with new_folder(target, force=force) as folder, SafetensorsWriter(folder, self.plan) as writer:
            self.write(writer)
            writer.start_sync()  # the disk works while the rest is done
            self.write_others(folder)
            self.verify(folder)

    def write(self, writer: SafetensorsWriter) -> None:
        tensors = {name: self.source.tensors[name] for name in self.outputs}
        with progress("writing", self.nbytes) as tick:
            for name, block in transformed(tensors, self.dtype, self.quantization):
                for planned, rows in zip(self.outputs[name], block, strict=True):
                    writer.append(planned.name, rows)
                tick(sum(rows.nbytes for rows in block))

    def write_others(self, folder: Path) -> None:
        source, config = self.source, self.source.config
        write_config(folder, config, self.dtype, self.quantization)
        context = config.max_context_length
        write_tokenizer(folder, self.tokenizer, source.folder, instruct=self.instruct, max_length=context)
        copy_extras(folder, source.path, config)

    def verify(self, folder: Path) -> None:
        config = self.source.config
        written = check_folder(folder, self.plan, config, self.quantization)
        with progress("verifying", self.nbytes) as tick:
            if self.is_copy:
                check_copy(self.source.tensors, written, tick)
            else:
                check_forward(written, config, self.quantization, self.dtype, tick)

    def summary(self, target: Path, seconds: float) -> ConversionSummary:
        parameters = self.source.config.num_parameters()
        bits = 8 * self.nbytes / parameters
        return ConversionSummary(
            target, parameters, bits, self.nbytes, seconds, self.dtype, self.quantization, self.instruct
        )


def _check_apart(target: Path, source: Path) -> None:
    """Writing over what is being read would lose it."""
    if source.resolve().is_relative_to(target.resolve()):
        raise OutputError(f"{target} is (or holds) the source itself; choose another folder with -o")


def _check_unquantized(source: Source) -> None:
    if source.quantization is not None:
        raise CheckpointError(
            f"{source.path} is already quantized ({source.quantization.default}); "
            "convert from the original weights instead"
        )


def _check_range(source: Source, dtype: str, force: bool) -> None:
    if dtype == "float16" and source.config.model_dim >= _LARGE_MODEL_DIM and not force:
        raise ConfigError(
            "a model of 3B's size overflows in float16; use --dtype bfloat16 (the default), or insist with --force"
        )


def _fit_vocabulary(source: Source, tokenizer: Path, keep_padding: bool) -> Source:
    """The model without the rows that CoreNet pads the vocabulary with, as the Hub's files are."""
    pieces = Tokenizer.from_path(tokenizer, vocab_size=source.config.vocab_size).vocab_size
    rows = source.config.vocab_size
    if not source.padded_vocabulary or keep_padding or pieces == rows:
        return source
    if rows - pieces > _MAX_PADDING_ROWS:
        raise TokenizerError(
            f"{tokenizer} has {pieces} pieces, the model {rows} rows: more than padding explains; "
            "name the model's own tokenizer with --tokenizer, or keep all rows with --keep-vocab-padding"
        )
    return source.with_vocabulary(pieces)


def _plan(source: Source, settings: QuantizationSettings, embedding_bits: int) -> Quantization:
    quantization = plan(source.config, settings, embedding_bits)
    if not quantization.modules:
        raise ConfigError(
            f"no row of this model is made up of whole groups of {settings.group_size}; nothing to quantize"
        )
    return quantization
