"""Converting every kind of file that Apple released: time, and memory over that of the interpreter.

Random files of a published size, each made and converted in a process of its own: a training checkpoint (three times
the model), the mean of two checkpoints, LoRA and DoRA fused and split, Apple's MLX folders in 16 and 4 bits. The bound
is 64 MB and one tensor, whatever the size of the file.

    python -m openelm_mlx.benchmarks.artefacts [--size 270M] [--kind training] [--folder DIR]
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import PUBLISHED_SIZES, OpenELMConfig
from ..errors import RunFailedError
from .child_run import interpreter_bytes, run_in_child
from .openblas import preload_openblas
from .random_checkpoint import padded_tokenizer

_BOUND_BYTES = 64e6
_RANK, _GROUP = 32, 64
_LINEARS = ("qkv_proj", "out_proj", "proj_1", "proj_2")
Shapes = dict[str, Any]  # name -> [dtype code, shape], or a dictionary of these

_MAKE_IMPORTS = """
import json, sys
from pathlib import Path
import numpy as np
from openelm_mlx.convert.torch_writer import TorchWriter
from openelm_mlx.safetensors_writer import PlannedTensor, SafetensorsWriter
"""
_MAKE = """
target, tree = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
rng, plan = np.random.default_rng(0), []
def planned(node, path):
    if isinstance(node, dict):
        return {name: planned(child, f"{path}/{name}" if path else name) for name, child in node.items()}
    if not isinstance(node, list):
        return node
    plan.append(PlannedTensor(path, node[0], tuple(node[1])))
    return plan[-1]
def rows(code, shape):
    if code == "U32":
        return rng.integers(0, 2**32, shape, dtype=np.uint32)
    return (0.02 * rng.standard_normal(shape, np.float32)).astype({"F32": np.float32, "F16": np.float16}[code])
tree = planned(tree, "")
with SafetensorsWriter(target, plan) if target.is_dir() else TorchWriter(target, tree) as writer:
    for tensor in plan:
        for start in range(0, tensor.shape[0], 512):
            writer.append(tensor.name, rows(tensor.dtype, (min(512, tensor.shape[0] - start), *tensor.shape[1:])))
"""
_CONVERT = "from openelm_mlx.convert.conversion import convert"
# kind -> (the file it is made of, options of convert)
KINDS = {
    "training": ("training", ""),
    "average of two": ("plain", "average_with=[sys.argv[1]]"),
    "LoRA, fused": ("lora", "fuse=True"),
    "LoRA, split": ("lora", 'adapter_path=sys.argv[2] + "-adapter"'),
    "DoRA, fused": ("dora", "fuse=True"),
    "Apple MLX, 16 bits": ("apple", ""),
    "Apple MLX, 4 bits": ("apple-4bit", ""),
    "Apple MLX, 4 bits, unpacked": ("apple-4bit", "dequantize=True"),
}


def contents(file: str, config: OpenELMConfig) -> Shapes:
    """The tensors of a kind of file, under CoreNet's names."""
    shapes = {name.removeprefix("transformer."): list(shape) for name, shape in config.parameter_shapes().items()}
    if file.startswith("apple"):
        return {k: v for name, shape in shapes.items() for k, v in _mlx(name, shape, file == "apple-4bit").items()}
    plain: Shapes = {name: ["F32", shape] for name, shape in shapes.items()}
    if file == "training":
        moments = {str(i): {"exp_avg": value, "exp_avg_sq": value} for i, value in enumerate(plain.values())}
        state = {"model_state_dict": plain, "optim_state_dict": {"state": moments, "param_groups": {}}}
        return {"iterations": 5, "epoch": 0, **state}
    if file == "plain":
        return plain
    return {k: v for name, shape in shapes.items() for k, v in _adapted(name, shape, file == "dora").items()}


def _mlx(name: str, shape: list[int], packed: bool) -> Shapes:
    module = name.removesuffix(".weight")
    if not packed or not module.endswith(_LINEARS):
        return {name: ["F16", shape]}
    groups = ["F16", [shape[0], shape[1] // _GROUP]]
    return {name: ["U32", [shape[0], shape[1] // 8]], f"{module}.scales": groups, f"{module}.biases": groups}


def _adapted(name: str, shape: list[int], dora: bool) -> Shapes:
    module = name.removesuffix(".weight")
    if module == "token_embeddings":
        prefix, suffix, sides = "lora_embedding_", "", {"A": [_RANK, shape[0]], "B": [shape[1], _RANK]}
    elif module.endswith(_LINEARS):
        prefix, suffix, sides = "lora_", ".weight", {"A": [_RANK, shape[1]], "B": [shape[0], _RANK]}
    else:
        return {name: ["F32", shape]}
    tensors: Shapes = {f"{module}.base_layer.weight": ["F32", shape]}
    tensors |= {f"{module}.{prefix}{side}.lora{suffix}": ["F32", size] for side, size in sides.items()}
    if dora and module != "token_embeddings":
        tensors[f"{module}.lora_magnitude_vector.lora"] = ["F32", [shape[0]]]
    return tensors


def make(file: str, size: str, folder: Path) -> Path:
    """Write a random file of a kind; returns what `openelm convert` is given."""
    config = OpenELMConfig.from_name(size, vocab_size=32128)
    plan = folder / f"{file}.json"
    plan.write_text(json.dumps(contents(file, config)), encoding="utf-8")
    target = folder / file
    if file.startswith("apple"):
        target.mkdir()
    run_in_child(_MAKE_IMPORTS, _MAKE, [target, plan])
    if target.is_dir():
        (target / "model.safetensors").rename(target / "weights.safetensors")
        raw: dict[str, Any] = {"model_name": f"OpenELM-{size}", "vocab_size": 32128, "max_context_length": 2048}
        if file == "apple-4bit":
            raw["quantization"] = {"group_size": _GROUP, "bits": 4}
        (target / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each kind. Raises RunFailedError when one takes more memory than its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=PUBLISHED_SIZES, default="270M")
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be repeated (all)")
    parser.add_argument("--folder", help="where the files go for the time of the run (the system's temporary folder)")
    args = parser.parse_args(arguments)
    config = OpenELMConfig.from_name(args.size, vocab_size=32128)
    bound = _BOUND_BYTES + 4 * config.vocab_size * config.model_dim  # the embedding is the largest tensor
    base, failed = interpreter_bytes(), []
    for kind in args.kind or KINDS:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            folder = Path(name)
            (folder / "tokenizer.model").write_bytes(padded_tokenizer(32000))
            source = make(KINDS[kind][0], args.size, folder)
            options = f"sys.argv[1], sys.argv[2], tokenizer=sys.argv[3], {KINDS[kind][1]}"
            run = run_in_child(_CONVERT, f"convert({options})", [source, folder / "out", folder / "tokenizer.model"])
            over = None if run.peak_bytes is None or base is None else run.peak_bytes - base
            print(json.dumps({"kind": kind, "size": args.size, "seconds": round(run.seconds, 2), "bytes_over": over}))
        if over is not None and over > bound:
            failed.append(kind)
    if failed:
        raise RunFailedError(f"more than {bound / 1e6:.0f} MB over the interpreter: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    preload_openblas()
    raise SystemExit(main())
