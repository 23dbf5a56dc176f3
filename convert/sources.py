"""What people have, read as one thing: tensors under Hub names, a configuration, and where both came from.

A reader looks at a path and returns a `Source`, or None when the path is not of its kind. What a file is, its
content says, never its name. A new kind of artefact is one more reader in `READERS`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import OpenELMConfig, read_json_object
from ..errors import AdapterError, CheckpointError, ConfigError
from ..quantize import Quantization, detect, logical_shapes
from ..safetensors_file import (
    INDEX_NAME,
    check_promised,
    read_folder,
    read_header,
    read_metadata,
    read_weight_map,
    refuse_damage,
    weight_files,
)
from ..tensors import FLOATING, StoredTensor, mlx_name
from .adapter_checkpoint import APPLE_ALPHA, CheckpointAdapter, split_adapter
from .apple_mlx import FORMAT as APPLE_MLX
from .apple_mlx import WEIGHTS_NAME, apple_config, is_apple_config
from .blocks import same_bytes
from .computed import unpacked
from .names import is_corenet, with_hub_names, without_wrappers
from .torch_file import read_torch_file
from .training_checkpoint import model_state

EMBEDDING = "transformer.token_embeddings.weight"
HEAD = "lm_head.weight"
_TORCH_FILE, _TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A checkpoint whose headers were read and checked; no value was read yet."""

    format: str  # mlx, hub-safetensors, hub-pytorch, apple-mlx, or corenet[-training | -lora | -dora]
    path: Path
    tensors: Mapping[str, StoredTensor]  # exactly the configuration's parameters, under Hub names
    config: OpenELMConfig
    quantization: Quantization | None = None
    padded_vocabulary: bool = False  # the embedding may have more rows than the tokenizer has pieces
    adapter: CheckpointAdapter | None = None  # what lies beside the base model, whose tensors these are
    training: Mapping[str, Any] = field(default_factory=dict)  # the counters of a training checkpoint
    is_computed: bool = False  # the tensors are computed as they are read: no file has these bytes
    notices: tuple[str, ...] = ()  # what was assumed, and what else is to be told before the work begins

    @property
    def folder(self) -> Path:
        """Where the files that belong to the model are, a tokenizer for instance."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtype(self) -> str:
        """MLX's name of the embedding's dtype, or of its scales' where it is packed: that of the activations."""
        tensor = self.tensors.get(EMBEDDING.replace(".weight", ".scales"), self.tensors[EMBEDDING])
        floating = tensor.dtype in FLOATING and tensor.dtype != "F64"
        return mlx_name(tensor.dtype) if floating else "float32"

    def tell(self) -> None:
        """Log the notices: when nothing can be refused any more, since a refusal is to stand alone."""
        for notice in self.notices:
            _log.warning("%s", notice)

    def unpacked(self) -> "Source":
        """The same model in plain numbers: packed matrices are unpacked to float32 as they are read."""
        if self.quantization is None:
            return self
        tensors = {}
        for name, shape in self.config.parameter_shapes().items():
            path = name.removesuffix(".weight")
            settings = self.quantization.modules.get(path)
            if settings is None:
                tensors[name] = self.tensors[name]
            else:
                parts = [self.tensors[f"{path}.{suffix}"] for suffix in settings.packed(shape, "F32")]
                tensors[name] = unpacked(name, parts, settings, shape[1])
        return replace(self, tensors=tensors, quantization=None, is_computed=True)

    def with_vocabulary(self, rows: int) -> "Source":
        """The same model with only the first `rows` rows of its embedding (and of an untied head), packed or not."""
        modules = tuple(name.removesuffix("weight") for name in (EMBEDDING, HEAD))
        trimmed = {name: tensor.first_rows(rows) for name, tensor in self.tensors.items() if name.startswith(modules)}
        return replace(
            self,
            tensors={**self.tensors, **trimmed},
            config=replace(self.config, vocab_size=rows),
            padded_vocabulary=False,
        )


@dataclass(frozen=True)
class Wanted:
    """What to read of a path: `config_file` (YAML or JSON) overrides its own, `use_ema` takes the averaged weights."""

    config_file: Path | None = None
    use_ema: bool = False

    def no_ema(self, path: Path) -> None:
        """Raise CheckpointError when the moving average is asked of a kind of file that has none."""
        if self.use_ema:
            raise CheckpointError(f"{path} is no training checkpoint, so it has no moving average; leave out --use-ema")


Reader = Callable[[Path, Wanted], Source | None]


def open_source(path: Path, config_file: Path | None = None, *, use_ema: bool = False) -> Source:
    """The checkpoint at a path; `config_file` (YAML or JSON) overrides the configuration it comes with.

    use_ema: a training checkpoint's moving average of the weights instead of the weights.
    Raises CheckpointError or ConfigError, naming everything that is missing, unknown or misshapen.
    """
    for reader in READERS:
        source = reader(path, Wanted(config_file, use_ema))
        if source is not None:
            return source
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder; name a checkpoint's file, or a model folder")
    refuse_adapter(path)
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{path} has no weights that are read here; expected model*.safetensors, {_TORCH_FILE} or Apple's "
        f"{WEIGHTS_NAME} (or name a CoreNet .pt file itself), found {found}"
    )


def refuse_adapter(folder: Path) -> None:
    """Raise AdapterError for an adapter folder, which has no base model in it."""
    if (folder / "adapter_config.json").is_file():
        raise AdapterError(
            f"{folder} is an adapter, not a model: fuse it into its base model (openelm fuse), use it beside that "
            "(openelm generate --adapter-path), or export it with --to peft"
        )


def make_source(
    kind: str,
    path: Path,
    stored: Mapping[str, StoredTensor],
    wanted: Wanted,
    own_config: Path | None,
    training: Mapping[str, Any] | None = None,
) -> Source:
    """A Source from tensors as they are named in their file. `own_config` is the config.json beside them, if any."""
    where = str(path)
    stored = without_wrappers(stored, where)
    corenet = is_corenet(stored)
    named = with_hub_names(stored, where)
    tensors, adapter = split_adapter(named, where, _yaml_of(wanted.config_file) if _has_adapter(named) else None)
    config_file = wanted.config_file or own_config
    config, raw = _configuration(tensors, config_file, where)
    notices = _assumed(config if config_file is None else None, adapter)
    if corenet and EMBEDDING in tensors and tensors[EMBEDDING].shape:
        # A configuration may state the vocabulary without CoreNet's padding, the tensors have it.
        config = replace(config, vocab_size=max(config.vocab_size, tensors[EMBEDDING].shape[0]))
    if config.share_input_output_layers and HEAD in tensors:
        _check_is_copy(tensors[HEAD], tensors.get(EMBEDDING), where)
        del tensors[HEAD]
    quantization = detect(tensors, raw, config, where)
    config.check_shapes(logical_shapes(tensors, quantization, config), where=where)
    return Source(
        _format(kind, corenet, adapter, training),
        path,
        tensors,
        config,
        quantization,
        padded_vocabulary=corenet,
        adapter=adapter,
        training=training or {},
        notices=notices,
    )


def _assumed(config: OpenELMConfig | None, adapter: CheckpointAdapter | None) -> tuple[str, ...]:
    """What no file says. `config` is the one made from the tensors alone, where it had to be."""
    notices = []
    if config is not None:
        notices.append(
            f"no configuration: widths taken from the tensors, a context of {config.max_context_length} tokens assumed "
            "(name one with --config)"
        )
    if adapter is not None and not adapter.alpha_is_known:
        notices.append(
            f"no training YAML says alpha: Apple's {APPLE_ALPHA} is taken, a scale of {adapter.scale:g} "
            "(name one with --config)"
        )
    return tuple(notices)


def _format(kind: str, corenet: bool, adapter: CheckpointAdapter | None, training: Mapping[str, Any] | None) -> str:
    if not corenet:
        return kind
    if adapter is not None:
        return f"corenet-{adapter.kind}"
    if kind == APPLE_MLX:
        return kind
    return "corenet-training" if training else "corenet"


def _safetensors_folder(path: Path, wanted: Wanted) -> Source | None:
    if not (path / INDEX_NAME).is_file() and not any(path.glob("model*.safetensors")):
        return None
    wanted.no_ema(path)
    metadata = read_metadata(weight_files(path)[0])
    kind = "mlx" if metadata.get("format") == "mlx" else "hub-safetensors"
    return make_source(kind, path, read_folder(path), wanted, _existing(path / "config.json"))


def _apple_mlx_folder(path: Path, wanted: Wanted) -> Source | None:
    if not (path / WEIGHTS_NAME).is_file():
        return None
    wanted.no_ema(path)
    stored = read_header(path / WEIGHTS_NAME)
    kind = APPLE_MLX if is_corenet(stored) else "hub-safetensors"
    return make_source(kind, path, stored, wanted, _existing(path / "config.json"))


def _torch_folder(path: Path, wanted: Wanted) -> Source | None:
    index = path / _TORCH_INDEX
    weight_map = read_weight_map(index)
    files = sorted(set(weight_map.values())) or [_TORCH_FILE]
    if not (path / files[0]).is_file():
        return None
    wanted.no_ema(path)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        found, _ = model_state(read_torch_file(path / file), str(path / file))
        twice = next((name for name in found if name in tensors), None)
        if twice:
            raise CheckpointError(f"{path}: two files hold {twice}; remove the files of the other model")
        tensors |= found
    check_promised(index, weight_map, tensors)
    return make_source("hub-pytorch", path, tensors, wanted, _existing(path / "config.json"))


def _single_file(path: Path, wanted: Wanted) -> Source | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    refuse_damage(path, head)
    beside, training = _existing(path.with_name("config.json")), None
    if head[8:9] == b"{":  # the header behind its length
        wanted.no_ema(path)
        stored = read_header(path)
        kind = "mlx" if read_metadata(path).get("format") == "mlx" else "hub-safetensors"
        if is_corenet(stored) and beside is not None and is_apple_config(read_json_object(beside)):
            kind = APPLE_MLX
    else:
        kind = "hub-pytorch"
        stored, training = model_state(read_torch_file(path), str(path), use_ema=wanted.use_ema)
    # A config.json beside a CoreNet .pt is of another model, or of Apple's MLX port of it.
    own_config = None if is_corenet(stored) and kind != APPLE_MLX else beside
    return make_source(kind, path, stored, wanted, own_config, training)


READERS: tuple[Reader, ...] = (
    _safetensors_folder,
    _torch_folder,
    _apple_mlx_folder,
    _single_file,
)  # safetensors win in a folder with both


def _configuration(
    tensors: Mapping[str, StoredTensor], file: Path | None, where: str
) -> tuple[OpenELMConfig, Mapping[str, Any]]:
    """The configuration, and the raw keys of its JSON (they may tell of a quantisation)."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if file is None:
        if any(name.endswith(".scales") for name in tensors):
            raise CheckpointError(
                f"{where}: the weights are quantized and there is no config.json; name it with --config"
            )
        if HEAD in tensors and EMBEDDING in tensors and same_bytes(tensors[HEAD], tensors[EMBEDDING]):
            del shapes[HEAD]
        return OpenELMConfig.from_shapes(shapes), {}
    if _is_json(file):
        raw = read_json_object(file)
        if is_apple_config(raw):
            return apple_config(raw, tensors, str(file)), raw
        return OpenELMConfig.from_dict(raw, where=str(file)), raw
    return OpenELMConfig.from_yaml(file, shapes), {}


def _has_adapter(tensors: Mapping[str, StoredTensor]) -> bool:
    return any(".lora_" in name for name in tensors)


def _yaml_of(file: Path | None) -> Path | None:
    """The configuration named by the user, where it is a training YAML: it tells an adapter's factor."""
    return None if file is None or _is_json(file) else file


def _is_json(file: Path) -> bool:
    """Whether a configuration is JSON, by its content; a spoilt config.json is not to be told from YAML's rules."""
    try:
        with file.open("rb") as stream:
            head = stream.read(64).lstrip()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    if not head:
        raise ConfigError(f"{file} is empty; expected a config.json or CoreNet's training YAML: fetch it again")
    return head[:1] == b"{" or file.suffix == ".json"


def _check_is_copy(head: StoredTensor, embedding: StoredTensor | None, where: str) -> None:
    """An output head saved beside the embedding it is tied to must be that embedding."""
    if embedding is None or not same_bytes(head, embedding):
        raise CheckpointError(
            f"{where}: lm_head.weight differs from the embedding, but the configuration ties the two "
            "(share_input_output_layers): set that to false, or remove lm_head.weight"
        )


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None
