"""A model as PyTorch saves it, written without PyTorch: under the Hub's names (pt) or under CoreNet's (corenet).

pt: the Hub's layout with pytorch_model.bin in the place of model.safetensors. corenet: openelm.pt, a flat state dict
as Apple's checkpoint_average.pt is, beside openelm.yaml with the model block of CoreNet's training configuration.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from ..config import PUBLISHED_SIZES, OpenELMConfig
from ..errors import RunFailedError
from ..safetensors_writer import MAX_SHARD_BYTES, PlannedTensor, index_of, shards
from ..tensors import StoredTensor
from .export_hf import HubJob, write_hub_config
from .export_source import Exported
from .job import Writer
from .names import to_corenet, with_hub_names
from .output import write_tokenizer
from .progress import progress
from .sources import EMBEDDING, HEAD
from .torch_file import read_torch_file, tensors_of
from .torch_writer import TorchWriter
from .verify import check_copy, check_forward

_INDEX_NAME = "pytorch_model.bin.index.json"
_STATE_NAME, _YAML_NAME = "openelm.pt", "openelm.yaml"


class TorchFiles:
    """Files of one state dict in a folder: a context manager, see job.Writer. Tensors come in the plan's order."""

    def __init__(self, folder: Path, files: Mapping[str, Sequence[PlannedTensor]]):
        self._waiting = [(folder / file, list(tensors)) for file, tensors in files.items()]
        self._names: list[str] = []  # names of the tensors in the open file
        self._open: TorchWriter | None = None

    def __enter__(self) -> Self:
        return self

    def append(self, name: str, rows: np.ndarray) -> None:
        """Write the next rows of a tensor. Raises OSError when the disk is full."""
        if self._open is None or name not in self._names:
            self.start_sync()
            path, tensors = self._waiting.pop(0)
            self._names = [tensor.name for tensor in tensors]
            self._open = TorchWriter(path, OrderedDict((tensor.name, tensor) for tensor in tensors)).__enter__()
        self._open.append(name, rows)

    def start_sync(self) -> None:
        """The open file is complete: give it its directory. The folder is synced before it has its name."""
        writer, self._open = self._open, None
        if writer is not None:
            writer.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        writer, self._open = self._open, None
        if writer is not None:
            writer.__exit__(kind, error, traceback)


@dataclass(frozen=True)
class TorchJob(HubJob):
    """One export into pytorch_model.bin, in shards as the Hub names them."""

    @property
    def files(self) -> dict[str, list[PlannedTensor]]:
        """File -> its tensors."""
        named = shards(self.plan, self.max_shard_bytes)
        return {
            file.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin"): group
            for file, group in named.items()
        }

    def writer(self, folder: Path) -> Writer:
        files = self.files
        if len(files) > 1:
            (folder / _INDEX_NAME).write_text(json.dumps(index_of(files), indent=2) + "\n", encoding="utf-8")
        return TorchFiles(folder, files)

    def verify(self, folder: Path) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for file in self.files:
            found |= tensors_of(read_torch_file(folder / file), str(folder / file))
        written = {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()}
        if written != {tensor.name: (tensor.dtype, tensor.shape) for tensor in self.plan}:
            raise RunFailedError(f"{folder}: the tensors on disk are not those that were written; is the disk sound?")
        tensors = with_hub_names(found, str(folder))
        with progress("verifying", self.nbytes) as tick:
            if self.is_copy:
                check_copy(self.source.tensors, tensors, tick)
            else:
                check_forward(tensors, self.config, None, self.dtype, tick)
        return tensors


@dataclass(frozen=True)
class CorenetJob(TorchJob):
    """One export under CoreNet's names. `pieces`: rows of the vocabulary that are tokens; the others are padding."""

    pieces: int = 0

    @classmethod
    def padded(cls, target: Path, model: Exported, multiple: int) -> "CorenetJob":
        """The job of a model whose vocabulary is padded to a multiple (0: left as it is)."""
        pieces = model.pieces
        source = model.source
        rows = source.config.vocab_size
        if multiple and rows == pieces:
            rows = (pieces // multiple + 1) * multiple  # at least one more: CoreNet's padding index is the first
            padding = {
                name: _padded(source.tensors[name], rows) for name in (EMBEDDING, HEAD) if name in source.tensors
            }
            source = replace(
                source, tensors={**source.tensors, **padding}, config=replace(source.config, vocab_size=rows)
            )
        job = cls.export(target, replace(model, source=source), max_shard_bytes=MAX_SHARD_BYTES)
        named = {
            name: [planned._replace(name=to_corenet(planned.name)) for planned in group]
            for name, group in job.outputs.items()
        }
        return replace(job, outputs=named, pieces=pieces)

    @property
    def files(self) -> dict[str, list[PlannedTensor]]:
        return {_STATE_NAME: self.plan}

    def write_others(self, folder: Path) -> None:
        write_hub_config(folder, self.config, self.dtype)  # `openelm convert --config` reads what the YAML cannot say
        (folder / _YAML_NAME).write_text(corenet_yaml(self.config, self.pieces), encoding="utf-8")
        context = self.config.max_context_length
        write_tokenizer(folder, self.tokenizer, self.source.folder, instruct=self.instruct, max_length=context)


def _padded(tensor: StoredTensor, rows: int) -> StoredTensor:
    """The matrix with rows of zeros behind its own."""

    def read(start: int, stop: int) -> np.ndarray:
        own = tensor.read_rows(min(start, tensor.num_rows), min(stop, tensor.num_rows))
        return np.pad(own, ((0, stop - start - len(own)), (0, 0)))

    return StoredTensor(tensor.name, tensor.dtype, (rows, *tensor.shape[1:]), read)


def corenet_yaml(config: OpenELMConfig, pieces: int) -> str:
    """The model block of CoreNet's training configuration for this model; `pieces` as in CorenetJob."""
    name = corenet_name(config)
    lines = [] if name else _table_entry(config)
    lines += [
        "model:",
        "  language_modeling:",
        '    name: "general_gpt"',
        "    general_gpt:",
        f'      model_name: "{name or "OpenELM-custom"}"',
        f"      vocab_size: {config.vocab_size}",
        f"      max_context_length: {config.max_context_length}",
    ]
    if config.vocab_size > pieces:
        lines.append(f"      padding_index: {pieces}")
    return "\n".join(lines) + "\n"


def corenet_name(config: OpenELMConfig) -> str | None:
    """The name under which CoreNet knows these widths, None for a model that is not one of the published sizes."""
    for size in PUBLISHED_SIZES:
        own = OpenELMConfig.from_name(size, vocab_size=config.vocab_size)
        same = ("num_query_heads", "rope_freq_constant", "rms_norm_eps")
        if own.parameter_shapes() == config.parameter_shapes() and all(
            getattr(own, field) == getattr(config, field) for field in same
        ):
            return f"OpenELM-{size}"
    return None


def _table_entry(config: OpenELMConfig) -> list[str]:
    """What a user of CoreNet must add to its table of sizes, as comments."""
    facts = {
        "num_transformer_layers": config.num_transformer_layers,
        "model_dim": config.model_dim,
        "head_dim": config.head_dim,
        "query heads of the layers": list(config.num_query_heads),
        "key/value heads of the layers": list(config.num_kv_heads),
        "feed-forward widths of the layers": list(config.ffn_dims),
        "ffn_with_glu": config.ffn_with_glu,
        "normalize_qk_projections": config.normalize_qk_projections,
        "share_input_output_layers": config.share_input_output_layers,
        "rope_freq_constant": config.rope_freq_constant,
        "rope_max_length": config.rope_max_length,
    }
    return [
        "# CoreNet knows the published sizes by name; this is none of them. Add an entry to its gpt_configs:",
        *(f"#   {key}: {value}" for key, value in facts.items()),
    ]
