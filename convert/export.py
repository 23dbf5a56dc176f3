"""A model back out, for other programs: `export("mlx_model", "gguf", "model.gguf")`.

    hf       the Hub's layout, safetensors      transformers (with Apple's code), mlx-lm, vLLM and others
    pt       the same as pytorch_model.bin      PyTorch
    corenet  CoreNet's state dict and YAML      Apple's CoreNet
    gguf     one file                           llama.cpp, Ollama, LM Studio

An adapter folder goes out with `peft_export.export_peft`. Everything is written whole or not at all.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic import check_target
from ..errors import ConfigError
from ..home import expand_home
from ..hub_upload import check_upload, upload
from .export_gguf import TYPES, check_gguf_target, export_gguf
from .export_hf import HubJob
from .export_source import ExportOptions, open_model
from .export_torch import CorenetJob, TorchJob
from .job import run

FORMATS = ("hf", "pt", "corenet", "gguf")


@dataclass(frozen=True)
class ExportSummary:
    """What was made. `kind` is the dtype or the GGUF type of the matrices; `nbytes` counts the weights."""

    path: Path
    format: str
    parameters: int
    kind: str
    nbytes: int
    seconds: float
    uploaded: str | None = None  # the address


def export(
    model: str | Path, to: str, out: str | Path, *, gguf_type: str | None = None, **options: Any
) -> ExportSummary:
    """Write a model (folder, file, Hub id or `tiny`) to `out` in one of FORMATS; `options` are ExportOptions'.

    gguf_type: F32, F16, BF16 or Q8_0, for gguf. Raises an OpenELMError with one line; `out` then is as it was.
    """
    started = time.perf_counter()
    settings, target = ExportOptions(**options), expand_home(out)
    _check(to, gguf_type, settings)
    if to == "gguf":
        check_gguf_target(target, force=settings.force)
    else:
        check_target(target, force=settings.force)
    opened = open_model(str(model), target, settings, keep_padding=to == "corenet")
    kind = opened.dtype
    if to == "gguf":
        kind, nbytes = export_gguf(opened, target, gguf_type=gguf_type, force=settings.force)
    else:
        if to == "corenet":
            job: HubJob = CorenetJob.padded(target, opened, settings.pad_vocab)
        else:
            made = HubJob if to == "hf" else TorchJob
            job = made.export(
                target, opened, max_shard_bytes=settings.max_shard_bytes, upload_repo=settings.upload_repo
            )
        run([job], force=settings.force)
        nbytes = job.nbytes
    parameters, seconds = opened.source.config.num_parameters(), time.perf_counter() - started
    return ExportSummary(target, to, parameters, kind, nbytes, seconds, _upload(target, settings))


def _check(to: str, gguf_type: str | None, settings: ExportOptions) -> None:
    if to not in FORMATS:
        raise ConfigError(f"the format must be {', '.join(FORMATS)}; got {to!r}")
    if gguf_type is not None and gguf_type not in TYPES:
        raise ConfigError(f"the GGUF type must be {', '.join(TYPES)}; got {gguf_type!r}")
    if settings.pad_vocab < 0:
        raise ConfigError(f"--pad-vocab must be 0 (no padding) or more, got {settings.pad_vocab}")
    if settings.max_shard_bytes <= 0:
        raise ConfigError(f"max_shard_bytes must be positive, got {settings.max_shard_bytes}")
    if settings.upload_repo is not None:
        check_upload(settings.upload_repo, dry_run=settings.upload_dry_run)


def _upload(folder: Path, settings: ExportOptions) -> str | None:
    if settings.upload_repo is None:
        return None
    return upload(
        folder,
        settings.upload_repo,
        card=(folder / "README.md").read_text(encoding="utf-8"),
        dry_run=settings.upload_dry_run,
        private=settings.upload_private,
    )
