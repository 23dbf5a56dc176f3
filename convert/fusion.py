"""An adapter merged into its base model: one model folder that needs no adapter.

Summed in float32, written in 16 bits. A quantised base is unpacked: what training changes is mostly smaller than a
step of four bits, and would be rounded away. `requantize` packs the sum again as the base was, and what that did to
the predictions is measured.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from ..adapter_config import AdapterSpec
from ..atomic import check_apart, check_target
from ..checkpoint import is_instruct
from ..errors import CheckpointError, ConfigError
from ..home import expand_home
from ..hub import find_tokenizer, is_hub_id, resolve_model
from ..hub_upload import check_upload, upload
from ..quantize import Quantization
from .conversion import DTYPES
from .fused import fused, fused_quantization
from .job import Job, run
from .measure import Measurement
from .needs import check_memory
from .sources import Source, open_source


@dataclass(frozen=True)
class Fusion:
    """What was made. `distance`: of its predictions from those of the base with its adapter, in float32."""

    path: Path
    spec: AdapterSpec
    parameters: int
    nbytes: int
    seconds: float
    dtype: str
    quantization: Quantization | None
    untied: bool  # the base's output head was its embedding, this one's is a matrix of its own
    unpacked: bool  # the base was quantised, this one is not
    distance: Measurement
    uploaded: str | None = None  # the address


def fuse(
    model: str | Path,
    adapter_path: str | Path = "adapters",
    save_path: str | Path = "fused_model",
    *,
    dtype: str | None = None,
    requantize: bool = False,
    tokenizer: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    force: bool = False,
    upload_repo: str | None = None,
    upload_private: bool = False,
    upload_dry_run: bool = False,
) -> Fusion:
    """Merge the adapter folder `adapter_path` into a folder, Hub id or file; write the model folder `save_path`.

    dtype: of what is not quantised; None is the base's own, or bfloat16 where that is float32. requantize: pack as the
    base is packed. tokenizer: where the base has none. Raises an OpenELMError with one line; the target then is as it
    was before.
    """
    started, target, name = time.perf_counter(), expand_home(save_path), str(model)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype must be {', '.join(DTYPES)}; got {dtype!r}")
    check_target(target, force=force)
    if upload_repo is not None:
        check_upload(upload_repo, dry_run=upload_dry_run)
    base_model = name if is_hub_id(name) else None
    path = resolve_model(name, revision=revision, offline=offline)
    check_apart(target, path, what="the base model", flag="--save-path")
    check_apart(target, Path(adapter_path), what="the adapter", flag="--save-path")
    base = _open_base(path, requantize)
    total, spec = fused(base, Path(adapter_path))
    untied = total.config != base.config
    check_memory(total.config)
    job = Job.of(
        target,
        total,
        find_tokenizer(tokenizer, path, vocab_size=base.config.vocab_size, offline=offline),
        instruct=is_instruct(name, base.folder),
        dtype=dtype or ("bfloat16" if base.dtype == "float32" else base.dtype),
        quantization=fused_quantization(base, untied) if requantize else None,
        base_model=base_model,
        upload_repo=upload_repo,
    )
    (distance,) = run([job], force=force, measured=True)
    assert distance is not None
    return Fusion(
        target,
        spec,
        job.config.num_parameters(),
        job.nbytes,
        time.perf_counter() - started,
        job.dtype,
        job.quantization,
        untied,
        base.quantization is not None and not requantize,
        distance,
        _upload(target, upload_repo, upload_dry_run, upload_private),
    )


def _open_base(path: Path, requantize: bool) -> Source:
    """The base model. Raises CheckpointError or ConfigError for one that nothing can be fused into as asked."""
    base = open_source(path)
    if base.adapter is not None:
        raise CheckpointError(f"{path} has an adapter in it already: merge that first (openelm convert --fuse)")
    if requantize and base.quantization is None:
        raise ConfigError(f"{path} is not quantized, so there is nothing to requantize; leave --requantize out")
    return base


def _upload(folder: Path, repo: str | None, dry_run: bool, private: bool) -> str | None:
    """The address of the uploaded folder, whose card was written with it."""
    if repo is None:
        return None
    card = (folder / "README.md").read_text(encoding="utf-8")
    return upload(folder, repo, card=card, dry_run=dry_run, private=private)
