"""openelm info: what a checkpoint is, without loading it.

SOURCE is anything that 'openelm convert' reads, a folder that it has made, an adapter folder, or CoreNet's
training_logs.txt.
"""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from .sources import Source

_BAR_WIDTH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("source", metavar="SOURCE", help="a Hub id, a folder, a file, or 'tiny'")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--config", metavar="YAML|JSON", help="the configuration, where the source has none")
    parser.add_argument("--plot", metavar="FILE", help="of a training log: draw loss and learning rate")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--offline", action="store_true", help="use only what is on this disk")


def run(args: argparse.Namespace) -> int:
    """Print the facts as a table for people, or as JSON."""
    from ..hub import resolve_model
    from .peft_command import is_adapter, print_adapter
    from .sources import open_source
    from .training_log import is_log
    from .training_log_output import print_log

    path = resolve_model(args.source, revision=args.revision, offline=args.offline)
    if is_adapter(path):
        return print_adapter(path, as_json=args.json)
    if path.is_file() and is_log(path):
        return print_log(path, as_json=args.json, plot=args.plot)
    if args.plot is not None:
        raise ConfigError(f"--plot is for training logs, and {args.source} is none; leave it out")
    source = open_source(path, Path(args.config) if args.config else None)
    source.tell()
    if args.json:
        print(json.dumps(describe(source)))
    else:
        _print_table(args.source, source)
    return 0


def describe(source: "Source") -> dict[str, Any]:
    """The facts of a checkpoint, ready for JSON."""
    from ..checkpoint import is_instruct
    from .consumers import consumers

    config, parameters = source.config, source.config.num_parameters()
    return {
        "format": source.format,
        "parameters": parameters,
        "dtype": _dtype(source),
        "quantization": source.quantization.to_config() if source.quantization else None,
        "bits_per_weight": round(8 * source.nbytes / parameters, 3),
        "bytes": source.nbytes,
        "vocab_size": config.vocab_size,
        "num_transformer_layers": config.num_transformer_layers,
        "model_dim": config.model_dim,
        "head_dim": config.head_dim,
        "num_query_heads": list(config.num_query_heads),
        "num_kv_heads": list(config.num_kv_heads),
        "ffn_dims": list(config.ffn_dims),
        "tied": config.share_input_output_layers,
        "tokenizer": next((n for n in ("tokenizer.model", "tokenizer.json") if (source.folder / n).is_file()), None),
        "chat_template": is_instruct("", source.folder),
        "training": dict(source.training) or None,
        "adapter": source.adapter.describe() if source.adapter else None,
        "consumers": consumers(source),
    }


def _dtype(source: "Source") -> str:
    """The floating-point dtype of the tensors, or all of them; packed integers have their own entry."""
    from ..tensors import FLOATING, mlx_name

    return ", ".join(sorted({mlx_name(t.dtype) for t in source.tensors.values() if t.dtype in FLOATING}))


def _print_table(name: str, source: "Source") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    facts, config = describe(source), source.config
    kind = f"{source.quantization.default}, the rest {facts['dtype']}" if source.quantization else facts["dtype"]
    console = Console(highlight=False)
    console.print(f"[bold]{escape(name)}[/bold] ({source.format})")
    console.print(f"{facts['parameters']:,} parameters, {kind}")
    console.print(f"{facts['bits_per_weight']:.2f} bits per weight, {facts['bytes']:,} bytes")
    console.print(
        f"model width {config.model_dim}, head width {config.head_dim}, vocabulary {config.vocab_size}, "
        f"context {config.max_context_length}"
    )
    console.print(
        f"output head {'tied to the embedding' if facts['tied'] else 'of its own'}, "
        f"tokenizer {facts['tokenizer'] or 'none'}, chat template {'yes' if facts['chat_template'] else 'no'}"
    )
    for line in _contents(facts):
        console.print(line)
    table = Table(box=None, pad_edge=False)
    for title in ("layer", "query heads", "kv heads", "FFN width", "parameters"):
        table.add_column(title, justify="right")
    table.add_column("")
    counts = _layer_parameters(source)
    rows = zip(config.num_query_heads, config.num_kv_heads, config.ffn_dims, counts, strict=True)
    for layer, (query, kv, ffn, count) in enumerate(rows):
        bar = "█" * max(1, round(_BAR_WIDTH * count / max(counts)))
        table.add_row(*map(str, (layer, query, kv, ffn)), f"{count:,}", bar)
    console.print(table)


def _contents(facts: Mapping[str, Any]) -> list[str]:
    """What else is in the file (an adapter, the state of a training), and who loads it."""
    from ..config_keys import counted

    lines, adapter, training = [], facts["adapter"], facts["training"]
    if adapter:
        kind = {"lora": "LoRA", "dora": "DoRA"}[adapter["kind"]]
        lines.append(
            f"{kind} adapter, rank {adapter['rank']}, scale {adapter['scale']:g}, {adapter['parameters']:,} parameters "
            f"on {counted(adapter['modules'], 'matrix', 'matrices')}"
            + (", the input embedding among them" if adapter["input_embedding"] else "")
        )
    if training:
        counters = [f"{key} {training[key]}" for key in ("iterations", "epoch", "best_metric") if key in training]
        lines.append(
            f"training checkpoint: {', '.join(counters)}, optimizer state {training['optimizer_bytes']:,} bytes, "
            f"moving average of the weights: {'yes' if training['has_ema'] else 'no'}"
        )
    answers: dict[str, list[str]] = {}
    for name, answer in facts["consumers"].items():
        answers.setdefault("loads it" if answer["loads"] else f"no, {answer['why_not']}", []).append(name)
    return [*lines, *(f"{', '.join(names)}: {answer}" for answer, names in answers.items())]


def _layer_parameters(source: "Source") -> list[int]:
    shapes: Mapping[str, tuple[int, ...]] = source.config.parameter_shapes()
    counts = [0] * source.config.num_transformer_layers
    for name, shape in shapes.items():
        if name.startswith("transformer.layers."):
            counts[int(name.split(".")[2])] += math.prod(shape)
    return counts
