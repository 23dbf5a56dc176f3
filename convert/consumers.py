"""Who loads a checkpoint as it is: mlx-lm, mlx-swift, llama.cpp's converter and transformers, and why not.

Told from the headers and the files beside them, by what these programs read and require (their sources, early 2026:
mlx_lm/models/openelm.py, mlx-swift-lm OpenELM.swift, llama.cpp conversion/openelm.py, Apple's modeling_openelm.py).
Nothing is run. To load means to compute the same from the same text; what keeps a program from it is listed completely.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import read_json_object
from ..config_keys import listing
from ..errors import OpenELMError

if TYPE_CHECKING:
    from .sources import Source

_FOLDERS = ("mlx", "hub-safetensors", "hub-pytorch")
_CODE = "modeling_openelm.py"


def consumers(source: "Source") -> dict[str, dict[str, Any]]:
    """Name -> {"loads": bool, "why_not": one line, or None}."""
    rules: dict[str, Callable[[Source, dict[str, Any]], list[str]]] = {
        "mlx-lm": _mlx_lm,
        "mlx-swift": _swift,
        "llama.cpp": _llama_cpp,
        "transformers": _transformers,
    }
    raw = _config_beside(source.folder)
    found = {}
    for name, rule in rules.items():
        faults = _not_a_folder(source) or rule(source, raw)
        found[name] = {"loads": not faults, "why_not": listing(faults) if faults else None}
    return found


def _not_a_folder(source: "Source") -> list[str]:
    """What no other program takes, whatever is in it."""
    if source.adapter is not None:
        return ["a model with its adapter beside it: openelm convert --fuse or --adapter-path"]
    if source.format not in _FOLDERS:
        return [f"{source.format} is no model folder of theirs: openelm convert"]
    if not source.path.is_dir():
        return ["a single file, not a model folder: openelm convert"]
    return []


def _mlx_lm(source: "Source", raw: dict[str, Any]) -> list[str]:
    faults = _no_config(raw)
    if source.format == "hub-pytorch":
        faults.append("it reads no pytorch_model.bin")
    if not _has_tokenizer(source.folder):
        faults.append("no tokenizer beside it")
    elif not (source.folder / "tokenizer_config.json").is_file():
        faults.append("no tokenizer_config.json, so BOS would be left out: openelm convert writes it")
    if "auto_map" in raw:
        faults.append("auto_map in config.json: it asks whether to run foreign code")
    return faults


def _swift(source: "Source", raw: dict[str, Any]) -> list[str]:
    from .swift_widths import swift_agrees

    config, faults = source.config, _no_config(raw)
    if source.format == "hub-pytorch":
        faults.append("it reads no pytorch_model.bin")
    if not all((source.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        faults.append("no tokenizer.json with tokenizer_config.json: openelm convert writes them")
    if not config.share_input_output_layers:
        faults.append("an output head of its own, which it builds with a wrong shape")
    if not config.ffn_with_glu:
        faults.append("a feed-forward network without a gate")
    if not swift_agrees(config):
        faults.append("layer widths that it does not read but computes, and otherwise")
    if (config.rope_freq_constant, config.rms_norm_eps) != (10000, 1e-6):
        faults.append("a rotation base or norm epsilon that it does not read")
    if source.quantization is not None and any(m.mode != "affine" for m in source.quantization.modules.values()):
        faults.append("a quantization mode other than affine (not established)")
    return faults


def _llama_cpp(source: "Source", raw: dict[str, Any]) -> list[str]:
    config, faults = source.config, _no_config(raw)
    if source.quantization is not None:
        faults.append("quantized by MLX: openelm convert --dequantize")
    if not config.share_input_output_layers:
        faults.append("an output head of its own, which its openelm has no tensor for")
    if not (config.ffn_with_glu and config.normalize_qk_projections):
        faults.append("no feed-forward gate or no query and key norms, which its openelm requires")
    if (config.rope_freq_constant, config.rms_norm_eps) != (10000, 1e-6):
        faults.append("a rotation base or norm epsilon that its converter does not read")
    if not (source.folder / "tokenizer.model").is_file():
        faults.append("no tokenizer.model beside it")
    return faults


def _transformers(source: "Source", raw: dict[str, Any]) -> list[str]:
    faults = _no_config(raw)
    mapped = raw.get("auto_map")
    remote = isinstance(mapped, dict) and any("--" in str(value) for value in mapped.values())
    if mapped is None or not (remote or (source.folder / _CODE).is_file()):
        faults.append(f"no {_CODE} (Apple's code, named by auto_map in config.json)")
    if source.quantization is not None:
        faults.append("quantized by MLX: openelm convert --dequantize")
    if not _has_tokenizer(source.folder):
        faults.append("no tokenizer beside it (the weights load)")
    return faults


def _no_config(raw: dict[str, Any]) -> list[str]:
    return [] if raw else ["no config.json"]


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file() or (folder / "tokenizer.model").is_file()


def _config_beside(folder: Path) -> dict[str, Any]:
    try:
        return read_json_object(folder / "config.json")
    except OpenELMError:
        return {}
