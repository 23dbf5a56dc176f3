"""A model as one GGUF file, for llama.cpp and what is built on it (Ollama, LM Studio): architecture `openelm`.

The file is written by the gguf package; tensors go into it row block by row block. Names and metadata are those that
llama.cpp's loader asks for (ggml-org/llama.cpp, src/models/openelm.cpp): per-layer widths as arrays, the stacked
gate and up projections apart, norms in float32, rotary halves as they are (no permutation).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..atomic import check_space
from ..atomic_file import check_file_target, new_file
from ..config import OpenELMConfig
from ..errors import CheckpointError, ConfigError, OutputError, RunFailedError
from ..tensors import StoredTensor
from .export_source import Exported
from .gguf_tokenizer import add_tokenizer, sentencepiece_file
from .output import chat_template
from .progress import progress
from .sources import EMBEDDING
from .streaming import transformed

if TYPE_CHECKING:
    from gguf import GGUFWriter

TYPES = ("F32", "F16", "BF16", "Q8_0")
_ARCHITECTURE = "openelm"
_TYPE_OF = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # of a dtype, where no type is asked for
_DTYPE_OF = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "float32"}  # what is computed on the way
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama.cpp's general.file_type
_QUANTIZATION_VERSION = 2
_Q8_GROUP, _Q8_MAX = 32, 127 * 65504.0  # a scale is a float16: the largest value of a group over 127
_OTHER_BYTES = 16 * 2**20  # the tokenizer and the metadata
_ALIGNMENT = 32  # GGUF's default, which the writer keeps
_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "attn.qkv_proj": "attn_qkv",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.out_proj": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.proj_2": "ffn_down",
}


@dataclass(frozen=True)
class Planned:
    """A tensor of the file: where its values are, and the GGUF type that they get."""

    tensor: StoredTensor
    type: str


def export_gguf(model: Exported, target: Path, *, gguf_type: str | None, force: bool) -> tuple[str, int]:
    """Write the file `target`; the type of its matrices and the bytes of its tensors.

    gguf_type: one of TYPES, None for the one that holds the model's own dtype. Raises ConfigError for a model that the
    format cannot hold, CheckpointError for values beyond float16's range, OutputError for the target.
    """
    gguf = _library()
    check_representable(model.source.config, model.name)
    chosen = gguf_type or _TYPE_OF[model.dtype]
    check_gguf_target(target, force=force)
    plan = planned(model.source.config, model.source.tensors, chosen)
    nbytes = sum(_nbytes(one) for one in plan.values())
    check_space(target, nbytes + _OTHER_BYTES)
    vocabulary = sentencepiece_file(model.tokenizer)
    model.source.tell()
    with new_file(target) as partial_file:
        writer = gguf.GGUFWriter(partial_file, _ARCHITECTURE)
        try:
            _add_metadata(writer, model, chosen)
            template = chat_template(model.source.folder) if model.instruct else None
            add_tokenizer(writer, vocabulary, model.source.config.vocab_size, template)
            for name, one in plan.items():
                shape, raw = one.tensor.shape, gguf.GGMLQuantizationType[one.type]
                writer.add_tensor_info(name, shape, np.dtype(np.float32), _nbytes(one), raw_dtype=raw)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            start = _write_tensors(writer, plan, nbytes)
        finally:
            writer.close()
        _verify(partial_file, plan, start, nbytes)
    return chosen, nbytes


def check_representable(config: OpenELMConfig, name: str) -> None:
    """Raise ConfigError unless llama.cpp's `openelm` can compute this model."""
    lacking = {
        "an output head of its own (untied)": not config.share_input_output_layers,
        "a feed-forward network without gate": not config.ffn_with_glu,
        "no normalised queries and keys": not config.normalize_qk_projections,
    }
    for what, found in lacking.items():
        if found:
            raise ConfigError(
                f"{name} has {what}, which llama.cpp's openelm architecture cannot hold; "
                "--to hf, pt and corenet can, and mlx-lm loads it as it is"
            )


def check_gguf_target(target: Path, *, force: bool) -> None:
    """Raise OutputError unless a file of this name can be written."""
    check_file_target(target)
    if target.exists() and not force:
        raise OutputError(f"{target} already exists; choose another name, or replace it with --force")


def planned(config: OpenELMConfig, tensors: Mapping[str, StoredTensor], gguf_type: str) -> dict[str, Planned]:
    """GGUF name -> what goes there, in the file's order. Raises ConfigError for widths that Q8_0 cannot group."""
    plan = {"token_embd.weight": Planned(tensors[EMBEDDING], gguf_type)}
    for i in range(config.num_transformer_layers):
        prefix, block = f"transformer.layers.{i}", f"blk.{i}"
        for name, theirs in _LAYER_NAMES.items():
            tensor = tensors[f"{prefix}.{name}.weight"]
            kind = gguf_type if len(tensor.shape) == 2 else "F32"
            plan[f"{block}.{theirs}.weight"] = Planned(tensor, kind)
        width, stacked = config.ffn_dims[i], tensors[f"{prefix}.ffn.proj_1.weight"]
        plan[f"{block}.ffn_gate.weight"] = Planned(_rows(stacked, 0, width), gguf_type)
        plan[f"{block}.ffn_up.weight"] = Planned(_rows(stacked, width, 2 * width), gguf_type)
    plan["output_norm.weight"] = Planned(tensors["transformer.norm.weight"], "F32")
    for name, one in plan.items():
        if one.type == "Q8_0" and one.tensor.shape[1] % _Q8_GROUP:
            raise ConfigError(
                f"{name} has rows of {one.tensor.shape[1]} values, and Q8_0 packs {_Q8_GROUP} at a time; "
                "choose --gguf-type F16, BF16 or F32"
            )
    return plan


def _rows(tensor: StoredTensor, first: int, stop: int) -> StoredTensor:
    """Some rows of a matrix as a matrix."""

    def read(start: int, end: int) -> np.ndarray:
        return tensor.read_rows(first + start, first + end)

    return StoredTensor(tensor.name, tensor.dtype, (stop - first, *tensor.shape[1:]), read)


def _nbytes(one: Planned) -> int:
    count = int(np.prod(one.tensor.shape, dtype=np.int64))
    return {"F32": 4 * count, "F16": 2 * count, "BF16": 2 * count, "Q8_0": count // _Q8_GROUP * (_Q8_GROUP + 2)}[
        one.type
    ]


def _add_metadata(writer: "GGUFWriter", model: Exported, gguf_type: str) -> None:
    config = model.source.config
    writer.add_type("model")
    writer.add_name(_title(model))
    writer.add_file_type(_FILE_TYPES[gguf_type])
    if gguf_type == "Q8_0":
        writer.add_quantization_version(_QUANTIZATION_VERSION)
    writer.add_block_count(config.num_transformer_layers)
    writer.add_context_length(config.max_context_length)
    writer.add_embedding_length(config.model_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(list(config.ffn_dims))
    writer.add_head_count(list(config.num_query_heads))
    writer.add_head_count_kv(list(config.num_kv_heads))
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_freq_constant)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _title(model: Exported) -> str:
    """What llama.cpp shows as the model's name."""
    return (model.base_model or model.source.folder.resolve().name).rpartition("/")[2] or "OpenELM"


def _write_tensors(writer: "GGUFWriter", plan: Mapping[str, Planned], nbytes: int) -> int:
    """Every tensor at its aligned place; where the first begins."""
    assert writer.fout is not None
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    start = file.tell()
    with progress("writing", nbytes) as tick:
        for name, one in plan.items():
            for rows in _encoded(name, one):
                file.write(rows.data)
                tick(rows.nbytes)
            writer.write_padding(file, _nbytes(one))
    return start


def _encoded(name: str, one: Planned) -> Iterator[np.ndarray]:
    """The bytes of a tensor, a few rows at a time."""
    dtype = _DTYPE_OF[one.type]
    for _, ((rows,),) in transformed({name: one.tensor}, dtype, [None]):
        values = _q8_0(name, rows) if one.type == "Q8_0" else rows
        yield np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _q8_0(name: str, rows: np.ndarray) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    if rows.size and float(np.abs(rows).max()) > _Q8_MAX:
        raise CheckpointError(f"{name} has values beyond {_Q8_MAX:.0f}, the range of Q8_0; choose --gguf-type F32")
    return quants.quantize(rows, GGMLQuantizationType.Q8_0)


def _verify(file: Path, plan: Mapping[str, Planned], start: int, nbytes: int) -> None:
    """Raise RunFailedError unless the file has the plan's bytes at the plan's places."""
    written = np.memmap(file, np.uint8, mode="r")
    position = start
    with progress("verifying", nbytes) as tick:
        for name, one in plan.items():
            place = position
            for rows in _encoded(name, one):
                if not np.array_equal(written[place : place + rows.size], rows):
                    raise RunFailedError(f"{name} on disk differs from what was written; is the disk sound?")
                place += rows.size
                tick(rows.nbytes)
            position += -(-_nbytes(one) // _ALIGNMENT) * _ALIGNMENT


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError("writing GGUF needs the gguf package; pip install 'openelm-mlx[gguf]'") from None
    return gguf
