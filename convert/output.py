"""Everything in a model folder that is not a weight: configuration, tokenizer, and what came with the source."""

import json
import shutil
from pathlib import Path
from typing import Any

from ..config import OpenELMConfig, read_json_object
from ..prompt import CHAT_TEMPLATE
from ..quantize import Quantization
from ..tokenizer import BOS, EOS, UNKNOWN
from ..tokenizer_files import write_tokenizer_files

_TEMPLATE_FILE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_COPIED = ("LICENSE*", "LICENCE*", "README.md")  # no code: nothing we write asks anyone to run some


def write_config(folder: Path, config: OpenELMConfig, dtype: str, quantization: Quantization | None) -> None:
    """config.json. `dtype` is what mlx-lm and transformers load the unpacked weights as."""
    raw = config.to_dict() | {"torch_dtype": dtype}
    if quantization is not None:
        # Twice, as mlx-lm writes it: the Hub's pages look for the second.
        raw |= {"quantization": quantization.to_config(), "quantization_config": quantization.to_config()}
    write_json(folder / "config.json", dict(sorted(raw.items())))


def copy_extras(folder: Path, source: Path, config: OpenELMConfig) -> None:
    """Licence and model card from the source's folder, and its generation settings or plain ones."""
    if source.is_dir():  # the folder of a single file may be anyone's
        for file in (file for pattern in _COPIED for file in source.glob(pattern) if file.is_file()):
            shutil.copyfile(file, folder / file.name)
        if (source / "generation_config.json").is_file():
            shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
            return
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    write_json(folder / "generation_config.json", {"_from_model_config": True} | ids)


def write_tokenizer(folder: Path, tokenizer: Path, source: Path, *, instruct: bool, max_length: int) -> None:
    """The tokenizer at a path (a file, or a folder with one), with a chat template for an Instruct model.

    The template is the one that lies with the source, else OpenELM's own; a tokenizer taken from another
    model does not bring that model's.
    """
    model = tokenizer / "tokenizer.model" if tokenizer.is_dir() else tokenizer
    if model.is_file() and model.suffix != ".json":
        write_tokenizer_files(model, folder, instruct=False, max_length=max_length)
    else:
        _copy_tokenizer_json(folder, tokenizer if tokenizer.is_dir() else tokenizer.parent, tokenizer)
    template: str | None = None
    if instruct and (source / _TEMPLATE_FILE).is_file():
        shutil.copyfile(source / _TEMPLATE_FILE, folder / _TEMPLATE_FILE)
    elif instruct:
        template = chat_template(source)
    _set_template(folder, template)


def chat_template(source: Path) -> str:
    """The template that lies with an Instruct model's folder, else OpenELM's own."""
    if (source / _TEMPLATE_FILE).is_file():
        return (source / _TEMPLATE_FILE).read_text(encoding="utf-8")
    return _read_tokenizer_config(source).get("chat_template") or CHAT_TEMPLATE


def _copy_tokenizer_json(folder: Path, beside: Path, tokenizer: Path) -> None:
    """A tokenizer without tokenizer.model (mlx_lm.convert leaves it behind): its files, byte for byte."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    shutil.copyfile(file, folder / "tokenizer.json")
    for name in (_TOKENIZER_CONFIG, "special_tokens_map.json"):
        if (beside / name).is_file():
            shutil.copyfile(beside / name, folder / name)
    if not (folder / _TOKENIZER_CONFIG).is_file():
        names = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN}
        write_json(folder / _TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"} | names)


def _set_template(folder: Path, template: str | None) -> None:
    """Make `template` the one in tokenizer_config.json; None takes out what is there."""
    raw = _read_tokenizer_config(folder)
    if raw.get("chat_template") == template:
        return
    rest = {key: value for key, value in raw.items() if key != "chat_template"}
    write_json(folder / _TOKENIZER_CONFIG, rest | ({} if template is None else {"chat_template": template}))


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / _TOKENIZER_CONFIG
    return read_json_object(path) if path.is_file() else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
