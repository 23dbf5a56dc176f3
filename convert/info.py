"""openelm info: what a checkpoint is, without loading it.

SOURCE is anything that 'openelm convert' reads, or a folder that it has made.
"""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sources import Source

_BAR_WIDTH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("source", metavar="SOURCE", help="a Hub id, a folder, a file, or 'tiny'")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--config", metavar="YAML|JSON", help="the configuration, where the source has none")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--offline", action="store_true", help="use only what is on this disk")


def run(args: argparse.Namespace) -> int:
    """Print the facts as a table for people, or as JSON."""
    from ..hub import resolve_model
    from .peft_command import peft_folder, print_adapter
    from .sources import open_source

    adapter = peft_folder(args.source)
    if adapter is not None:
        return print_adapter(adapter, as_json=args.json)
    path = resolve_model(args.source, revision=args.revision, offline=args.offline)
    source = open_source(path, Path(args.config) if args.config else None)
    if args.json:
        print(json.dumps(describe(source)))
    else:
        _print_table(args.source, source)
    return 0


def describe(source: "Source") -> dict[str, Any]:
    """The facts of a checkpoint, ready for JSON."""
    from ..checkpoint import is_instruct

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


def _layer_parameters(source: "Source") -> list[int]:
    shapes: Mapping[str, tuple[int, ...]] = source.config.parameter_shapes()
    counts = [0] * source.config.num_transformer_layers
    for name, shape in shapes.items():
        if name.startswith("transformer.layers."):
            counts[int(name.split(".")[2])] += math.prod(shape)
    return counts
