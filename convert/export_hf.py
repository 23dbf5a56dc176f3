"""A model in the Hub's layout: the folder that apple/OpenELM-... is on the Hub, with the tokenizer that it lacks.

Names, shard sizes, index and config.json are the Hub's (apple/OpenELM-3B: model-0000i-of-00003.safetensors of at most
5 GB). `auto_map` is left out: it names Apple's Python files, which are not carried, and whoever finds it asks the user
to run them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from ..config import OpenELMConfig
from ..safetensors_writer import MAX_SHARD_BYTES, SafetensorsWriter
from .export_source import Exported
from .job import Job, Writer
from .output import copy_extras, write_json, write_tokenizer

_TRANSFORMERS_VERSION = "4.39.3"  # the release whose files these are: the Hub's say so
_DEFAULT_EPS = 1e-6


@dataclass(frozen=True)
class HubJob(Job):
    """One export with the Hub's names."""

    max_shard_bytes: int = MAX_SHARD_BYTES
    layout: ClassVar[str] = "Hugging Face"

    @classmethod
    def export(cls, target: Path, model: Exported, *, max_shard_bytes: int, upload_repo: str | None = None) -> Self:
        """The job that writes a model to a folder, with the weights named and typed as they will be."""
        job = cls.of(
            target,
            model.source,
            model.tokenizer,
            instruct=model.instruct,
            dtype=model.dtype,
            quantization=None,
            base_model=model.base_model,
            upload_repo=upload_repo,
        )
        return replace(job, max_shard_bytes=max_shard_bytes)

    def writer(self, folder: Path) -> Writer:
        return SafetensorsWriter(folder, self.plan, max_shard_bytes=self.max_shard_bytes, format="pt")

    def write_others(self, folder: Path) -> None:
        write_hub_config(folder, self.config, self.dtype)
        context = self.config.max_context_length
        write_tokenizer(folder, self.tokenizer, self.source.folder, instruct=self.instruct, max_length=context)
        copy_extras(folder, self.source.path, self.config)


def write_hub_config(folder: Path, config: OpenELMConfig, dtype: str) -> None:
    """config.json with the keys that the Hub's has. `dtype` is that of the weights."""
    raw = config.to_dict() | {"torch_dtype": dtype, "transformers_version": _TRANSFORMERS_VERSION}
    if config.rms_norm_eps == _DEFAULT_EPS:
        del raw["rms_norm_eps"]  # Apple's code knows no other value, and has no key for it
    write_json(folder / "config.json", dict(sorted(raw.items())))
