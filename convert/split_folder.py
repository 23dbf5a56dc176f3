"""The adapter of a LoRA or DoRA checkpoint as a folder of its own, for the base model that is converted beside it.

mlx-lm's names and orientation: `lora_a` (I, R) and `lora_b` (R, O) are A' and B', `m` the magnitudes. The embedding's
adapter has the names of our input-only layer, which mlx-lm refuses rather than apply to the output head as well.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..adapter_config import EMBEDDING_PATH, adapter_config
from ..adapters import CONFIG_NAME, WEIGHTS_NAME
from ..atomic import check_space, check_target
from ..errors import OutputError
from ..home import expand_home
from ..safetensors_writer import write_file
from ..tensors import StoredTensor
from .adapter_checkpoint import CheckpointAdapter
from .needs import OTHER_FILES_BYTES
from .sources import Source

if TYPE_CHECKING:
    from .conversion import Options


@dataclass(frozen=True)
class AdapterFolder:
    """The folder to be written beside the base model's: each gets its name if the other does."""

    target: Path
    tensors: Mapping[str, StoredTensor]
    config: str  # what its adapter_config.json says

    def write(self, folder: Path) -> None:
        """Write the files into a folder that will be `target`."""
        write_file(folder / WEIGHTS_NAME, self.tensors)
        (folder / CONFIG_NAME).write_text(self.config, encoding="utf-8")


def adapter_beside(source: Source, base_target: Path, options: "Options") -> list[AdapterFolder]:
    """The adapter's folder, where one was asked for. `source`: the base, with the vocabulary it is converted with.

    Raises OutputError when it cannot be written, CheckpointError for an adapter that no folder can express.
    """
    if options.adapter_path is None or source.adapter is None:
        return []
    target = expand_home(options.adapter_path)
    mine, base = target.resolve(), base_target.resolve()
    if mine.is_relative_to(base) or base.is_relative_to(mine) or source.path.resolve().is_relative_to(mine):
        raise OutputError(
            f"{target} is, or overlaps, the source or the base model's folder; choose another place for it"
        )
    spec = replace(source.adapter.spec(source.config, str(source.path)), base_model=str(base_target))
    tensors = _tensors(source.adapter, source.config.vocab_size)
    check_target(target, force=options.force)
    check_space(target, sum(tensor.nbytes for tensor in tensors.values()) + OTHER_FILES_BYTES)
    text = json.dumps(adapter_config(spec, source.config), ensure_ascii=False, indent=2, sort_keys=True) + "\n"
    return [AdapterFolder(target, tensors, text)]


def _tensors(adapter: CheckpointAdapter, vocab_size: int) -> dict[str, StoredTensor]:
    """What the folder holds, each tensor transposed as it is read; the embedding's without the padding rows."""
    tensors: dict[str, StoredTensor] = {}
    for path, part in adapter.parts.items():
        a, b = part.a.transposed(), part.b.transposed()
        if path == EMBEDDING_PATH:
            tensors |= {f"{path}.input_lora_a": a.first_rows(vocab_size), f"{path}.input_lora_b": b}
        else:
            tensors |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
        if part.magnitude is not None:
            tensors[f"{path}.m"] = part.magnitude
    return tensors
