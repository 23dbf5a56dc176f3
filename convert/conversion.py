"""Any OpenELM checkpoint in, an MLX model folder out: `convert(source, mlx_path)`.

Everything that can be refused is refused before the first byte is written, and before the weights are fetched. They
then stream through (streaming.py) into hidden siblings of the targets, are verified there (verify.py), and get their
names last (job.py).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..atomic import check_apart, check_target
from ..checkpoint import is_instruct
from ..config import OpenELMConfig
from ..errors import ConfigError, TokenizerError
from ..home import expand_home
from ..hub import find_tokenizer, is_hub_id, resolve_model
from ..hub_upload import check_upload, upload
from ..quantize import Quantization
from ..tokenizer import Tokenizer
from .choices import Choices, applied, check_adapter, notes, open_chosen
from .job import Job, run
from .measure import Measurement
from .needs import check_disk, check_memory
from .options import FolderOptions
from .packing import Packing
from .sources import Source
from .split_folder import adapter_beside

DTYPES = ("bfloat16", "float16", "float32")
_LARGE_MODEL_DIM = 3072  # 3B: its activations leave float16's range (apple/corenet mlx_examples/open_elm/README.md)
_MAX_PADDING_ROWS = 256  # CoreNet pads the vocabulary to a multiple of 128, the padding id included


@dataclass(frozen=True, kw_only=True)
class Options(FolderOptions, Choices, Packing):
    """How to convert; `Packing` has how to quantise, `Choices` what becomes of adapters, packed weights and averages.

    dtype: of the unquantised weights, and of the scales; None is bfloat16, but packed weights and Apple's MLX files
    keep their own.
    measure: compare what the new weights predict with what the source's predict.
    """

    keep_vocab_padding: bool = False
    measure: bool = False


@dataclass(frozen=True)
class ConversionSummary:
    """What was made. `nbytes` counts the weights; `seconds` everything but an upload, downloads included."""

    path: Path
    parameters: int
    bits_per_weight: float
    nbytes: int
    seconds: float
    dtype: str
    quantization: Quantization | None
    instruct: bool
    measured: Measurement | None = None
    uploaded: str | None = None  # the address
    notes: tuple[str, ...] = ()  # what a merged adapter changes
    refinement: str | None = None  # what was done beyond plain, uniform packing


def convert(source: str | Path, mlx_path: str | Path = "mlx_model", **options: Any) -> ConversionSummary:
    """Convert a folder, a file, a Hub id or `tiny` into the model folder `mlx_path`; `options` are those of `Options`.

    Raises an OpenELMError with one line; the target then is as it was before.
    """
    (summary,) = _convert(source, [Path(mlx_path)], [Options(**options)])
    return summary


def convert_all(
    source: str | Path, mlx_path: str | Path = "mlx_model", *, q_bits: Sequence[int], **options: Any
) -> list[ConversionSummary]:
    """Several quantisations from one read of the source: `mlx_path` with "-4bit", "-8bit" and so on behind it.

    The name of `upload_repo` gets the same endings. All folders appear, or none.
    """
    if not q_bits or len(set(q_bits)) != len(q_bits):
        raise ConfigError(f"expected different numbers of bits, got {list(q_bits)}")
    common, path = Options(**options, quantize=True), Path(mlx_path)
    repo = common.upload_repo
    each = [replace(common, q_bits=bits, upload_repo=None if repo is None else f"{repo}-{bits}bit") for bits in q_bits]
    return _convert(source, [path.with_name(f"{path.name}-{bits}bit") for bits in q_bits], each)


def _convert(source: str | Path, paths: Sequence[Path], each: Sequence[Options]) -> list[ConversionSummary]:
    """One folder for each of the options, which differ in their quantisation alone."""
    started, options, name = time.perf_counter(), each[0], str(source)
    targets = [expand_home(path) for path in paths]
    _check_options(targets, each)

    def before_weights(folder: Path, download_bytes: int) -> None:
        if options.config is None and (folder / "config.json").is_file():  # an adapter has none
            config = OpenELMConfig.from_file(folder / "config.json")
            quantizations = [one.planned(config) for one in each]
            check_memory(config, len(each))
            find_tokenizer(options.tokenizer, folder, vocab_size=config.vocab_size, offline=options.offline)
            dtype = options.dtype or "bfloat16"
            check_disk(targets[0], config, dtype, quantizations, cache=folder, download_bytes=download_bytes)

    is_remote = is_hub_id(name)
    path = resolve_model(name, revision=options.revision, offline=options.offline, before_weights=before_weights)
    for target in targets:
        for read in (path, *map(Path, options.average_with)):
            check_apart(target, read)
    with_adapter, found = _checked_source(path, options)
    opened, dtype = applied(with_adapter, options)
    _check_range(opened, dtype, options.force)
    check_memory(opened.config, len(each))
    beside = adapter_beside(with_adapter, targets[0], options)
    if options.method == "gptq":  # before its minutes of work
        quantizations = [one.planned(opened.config) for one in each]
        check_disk(targets[0], opened.config, dtype, quantizations, cache=path, download_bytes=0)
    instruct = is_instruct(name, opened.folder) if options.instruct is None else options.instruct
    jobs = [
        Job.of(
            target,
            one.packed(opened, found, dtype),
            found,
            instruct=instruct,
            dtype=dtype,
            quantization=opened.quantization or one.planned(opened.config),
            base_model=name if is_remote else None,
            upload_repo=one.upload_repo,
        )
        for target, one in zip(targets, each, strict=True)
    ]
    said = notes(with_adapter, found, options)
    distances = run(jobs, force=options.force, measured=options.measure, reference=opened, beside=beside)
    seconds = time.perf_counter() - started
    return [
        replace(_summary(job, distance, seconds, _upload(job.target, one)), notes=said, refinement=one.refinement)
        for job, distance, one in zip(jobs, distances, each, strict=True)
    ]


def _check_options(targets: Sequence[Path], each: Sequence[Options]) -> None:
    """What needs no look at the source."""
    for target, options in zip(targets, each, strict=True):
        options.check_packing()
        options.check()
        if options.method == "gptq" and len(each) > 1:
            raise ConfigError("--method gptq makes one folder at a time: give --q-bits once")
        if options.dtype is not None and options.dtype not in DTYPES:
            raise ConfigError(f"dtype must be {', '.join(DTYPES)}; got {options.dtype!r}")
        check_target(target, force=options.force)
        if options.upload_repo is not None:
            check_upload(options.upload_repo, dry_run=options.upload_dry_run)


def _checked_source(path: Path, options: Options) -> tuple[Source, Path]:
    """The source, known to be convertible, and where its tokenizer is."""
    opened = open_chosen(path, options)
    check_adapter(opened, options)
    vocab_size = opened.config.vocab_size
    found = find_tokenizer(options.tokenizer, path, vocab_size=vocab_size, offline=options.offline)
    return fit_vocabulary(opened, found, options.keep_vocab_padding), found


def _summary(job: Job, measured: Measurement | None, seconds: float, uploaded: str | None) -> ConversionSummary:
    parameters = job.config.num_parameters()
    return ConversionSummary(
        job.target,
        parameters,
        8 * job.nbytes / parameters,
        job.nbytes,
        seconds,
        job.dtype,
        job.quantization,
        job.instruct,
        measured,
        uploaded,
    )


def _upload(folder: Path, options: Options) -> str | None:
    """The address of the uploaded folder, whose card was written with it."""
    if options.upload_repo is None:
        return None
    card = (folder / "README.md").read_text(encoding="utf-8")
    return upload(
        folder, options.upload_repo, card=card, dry_run=options.upload_dry_run, private=options.upload_private
    )


def _check_range(source: Source, dtype: str, force: bool) -> None:
    if dtype == "float16" and source.config.model_dim >= _LARGE_MODEL_DIM and not force:
        raise ConfigError(
            "a model of 3B's size overflows in float16; use --dtype bfloat16 (the default), or insist with --force"
        )


def fit_vocabulary(source: Source, tokenizer: Path, keep_padding: bool) -> Source:
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
