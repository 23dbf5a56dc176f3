"""The adapter of a LoRA or DoRA checkpoint as a folder of its own, for the base model that is converted beside it.

mlx-lm's names and orientation: `lora_a` (I, R) and `lora_b` (R, O) are A' and B', `m` the magnitudes. The embedding's
adapter has the names of our input-only layer, which mlx-lm refuses rather than apply to the output head as well.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..adapter_config import EMBEDDING_PATH, adapter_config
from ..adapters import CONFIG_NAME, WEIGHTS_NAME
from ..atomic import check_space, new_folder
from ..errors import OutputError
from ..home import expand_home
from ..safetensors_writer import write_file
from ..tensors import StoredTensor
from .adapter_checkpoint import CheckpointAdapter
from .needs import OTHER_FILES_BYTES
from .sources import Source

if TYPE_CHECKING:
    from .conversion import Options


def adapter_beside(source: Source, base_target: Path, options: "Options") -> AbstractContextManager[None]:
    """`adapter_folder` where a folder for the adapter was asked for, else nothing."""
    if options.adapter_path is None or source.adapter is None:
        return nullcontext()
    target = expand_home(options.adapter_path)
    mine, base = target.resolve(), base_target.resolve()
    if mine.is_relative_to(base) or base.is_relative_to(mine) or source.path.resolve().is_relative_to(mine):
        raise OutputError(
            f"{target} is, or overlaps, the source or the base model's folder; choose another place for it"
        )
    return adapter_folder(target, source, source.adapter, base_target, force=options.force)


@contextmanager
def adapter_folder(
    target: Path, source: Source, adapter: CheckpointAdapter, base_target: Path, *, force: bool
) -> Iterator[None]:
    """Write the folder, and give it its name once the block (which makes the base model's folder) has ended well.

    `source` is the base, with the vocabulary that it is converted with. Raises as `new_folder` does, and
    CheckpointError for an adapter that no folder can express.
    """
    spec = replace(adapter.spec(source.config, str(source.path)), base_model=str(base_target))
    tensors = _tensors(adapter, source.config.vocab_size)
    check_space(target, sum(tensor.nbytes for tensor in tensors.values()) + OTHER_FILES_BYTES)
    with new_folder(target, force=force) as folder:
        write_file(folder / WEIGHTS_NAME, tensors)
        text = json.dumps(adapter_config(spec, source.config), ensure_ascii=False, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
        yield


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
