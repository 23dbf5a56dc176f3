"""What `openelm convert` does with a PEFT adapter folder, which is no model, and `openelm info` with any adapter."""

import argparse
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..home import expand_home

# What convert can be asked of a model; `more` are the further checkpoints of an average.
_FOR_MODELS = (
    "quantize", "q_bits", "q_group_size", "q_mode", "embedding_bits", "recipe", "method", "calibration", "seed",
    "dtype", "average", "more", "dequantize", "use_ema", "fuse", "tie", "adapter_path", "tokenizer", "config",
    "revision", "keep_vocab_padding", "measure", "instruct", "upload_repo", "upload_private", "upload_dry_run",
)  # fmt: skip
_PEFT_LOADS = (
    "loads in PEFT; 'openelm convert' makes a folder that openelm, and mlx-lm unless the embedding is adapted, load"
)
_OURS_LOAD = (
    "loads in openelm (--adapter-path), and in mlx-lm unless the input embedding alone is adapted; 'openelm fuse' "
    "makes one model of it, 'openelm export --to peft' a folder for PEFT (of whole weights not)"
)


def peft_folder(source: str) -> Path | None:
    """The folder that `source` names, if a PEFT adapter is in it."""
    from .peft import is_peft

    try:
        folder = Path(source).expanduser()
    except RuntimeError:  # `~name` of a user that is not here: whoever looks for a model says so
        return None
    return folder if is_peft(folder) else None


def convert_adapter(folder: Path, args: argparse.Namespace) -> int:
    """Make the adapter folder `args.mlx_path`, then say what it is and how to use it."""
    unused = [flag for flag in _FOR_MODELS if getattr(args, flag, None) not in (None, False, [])]
    if unused:
        flag = "a further SOURCE" if unused[0] == "more" else f"--{unused[0].replace('_', '-')}"
        raise ConfigError(
            f"{flag} is for models, and {folder} is a PEFT adapter: leave it out (numbers stay as they are)"
        )
    from .peft_import import import_peft

    adapter = import_peft(folder, expand_home(args.mlx_path), force=args.force)
    facts = _facts(adapter.spec, adapter.parameters)
    print(f"{args.mlx_path}: {_sentence(facts)}")
    base = shlex.quote(facts["base_model"] or "BASE_MODEL")
    print(f"next: openelm generate --model {base} --adapter-path {shlex.quote(args.mlx_path)}", file=sys.stderr)
    if args.json:
        print(json.dumps(facts | {"path": args.mlx_path, "format": "mlx-lm"}))
    return 0


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, of whatever kind, and no model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def print_adapter(folder: Path, *, as_json: bool) -> int:
    """The facts of an adapter folder, for people or as JSON."""
    from .peft_import import read_peft

    if peft_folder(str(folder)) is None:
        facts, name, readers = _own_facts(folder), "adapter", _OURS_LOAD
    else:
        adapter = read_peft(folder)
        facts, name, readers = _facts(adapter.spec, adapter.parameters), "PEFT adapter", _PEFT_LOADS
    if as_json:
        print(json.dumps(facts))
        return 0
    print(f"{folder} ({name}): {_sentence(facts)}")
    dropout = "" if facts["dropout"] is None else f", dropout {facts['dropout']:g}"
    print(f"trained on {facts['base_model'] or 'a model that it does not name'}{dropout}")
    print(readers)
    return 0


def _own_facts(folder: Path) -> dict[str, Any]:
    """Those of a folder that this project or mlx-lm wrote."""
    from ..adapter_config import read_adapter_config
    from ..safetensors_file import read_header

    spec = read_adapter_config(folder / "adapter_config.json")
    tensors = read_header(folder / "adapters.safetensors")
    facts = _facts(spec, sum(math.prod(tensor.shape) for tensor in tensors.values())) | {"format": "mlx-lm"}
    if spec.keys is None:  # every linear layer: the file has their names
        layers = (re.fullmatch(r"transformer\.layers\.\d+\.(.+)\.\w+", name) for name in tensors)
        facts["keys"] = sorted({match[1] for match in layers if match})
    return facts if spec.fine_tune_type != "full" else facts | dict.fromkeys(("rank", "scale", "dropout"))


def _facts(spec: Any, parameters: int) -> dict[str, Any]:
    return {
        "format": "peft",
        "fine_tune_type": spec.fine_tune_type,
        "rank": spec.rank,
        "scale": spec.scale,
        "dropout": spec.dropout,
        "keys": list(spec.keys or ()),
        "num_layers": spec.num_layers,
        "input_embedding": spec.input_embedding,
        "parameters": parameters,
        "base_model": spec.base_model,
    }


def _sentence(facts: dict[str, Any]) -> str:
    if facts["fine_tune_type"] == "full":
        return f"whole trained weights, {facts['parameters']:,} parameters"
    kind = {"lora": "LoRA", "dora": "DoRA"}[facts["fine_tune_type"]]
    where = [*facts["keys"], *(["the input embedding"] if facts["input_embedding"] else [])]
    shown = ", ".join(where[:6]) + (f" and {len(where) - 6} more" if len(where) > 6 else "")
    return f"{kind}, rank {facts['rank']}, scale {facts['scale']:g}, {facts['parameters']:,} parameters on {shown}"
