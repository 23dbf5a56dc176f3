"""The flags of `openelm lora`. One that is not given is None, so that a YAML file or a recipe may decide."""

import argparse
import re

from ..adapter_config import EMBEDDING_KINDS, FINE_TUNE_TYPES
from ..model_arguments import DTYPES
from .data_arguments import add_data_arguments
from .schedule import NAMES as SCHEDULES
from .settings import OPTIMIZERS
from .settings_sources import recipe_names

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
YES_OR_NO = argparse.BooleanOptionalAction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """mlx-lm's flags, under its names, and ours."""
    _add_run_arguments(parser)
    _add_model_arguments(parser.add_argument_group("model"))
    add_data_arguments(parser)
    _add_method_arguments(parser.add_argument_group("method"))
    _add_optimizer_arguments(parser.add_argument_group("optimizer"))
    _add_loop_arguments(parser.add_argument_group("loop"))
    _add_output_arguments(parser.add_argument_group("output"))


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="a YAML file with mlx-lm's keys; flags override it")
    parser.add_argument("--recipe", choices=recipe_names(), help="settings to begin with; file and flags override them")
    parser.add_argument("--train", action="store_true", default=None, help="train (unless --test alone is given)")
    parser.add_argument("--test", action="store_true", default=None, help="measure the loss on the test data")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --adapter-path, exactly")
    parser.add_argument("--force", action="store_true", help="replace the adapters of an earlier run")
    parser.add_argument("--dry-run", action="store_true", help="say what would be trained, and the memory it takes")


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", metavar="MODEL", help="a folder, a Hub id, or 'tiny', the bundled toy (default)")
    group.add_argument("--tokenizer", metavar="FILE|DIR|HUB_ID", help="where the tokenizer is, if not with the model")
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    group.add_argument("--offline", action="store_true", default=None, help="use only what is on this machine")
    group.add_argument("--dtype", choices=DTYPES, help="of unquantised weights (auto: the folder's; float32 on a CPU)")
    group.add_argument("--keep-quantized", action=YES_OR_NO, default=None, help="never dequantise, also on a CPU")
    group.add_argument("--trust-remote-code", action="store_true", help="accepted for mlx-lm's sake; no code is run")


def _add_method_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--fine-tune-type", choices=FINE_TUNE_TYPES, help="lora (default), dora, or full weights")
    group.add_argument("--num-layers", type=int, metavar="N", help="train the last N layers (-1, all)")
    group.add_argument("--keys", nargs="+", metavar="KEY", help="layers to adapt, such as attn.qkv_proj (all linear)")
    group.add_argument("--rank", type=int, metavar="R", help="of the adapters (8)")
    group.add_argument("--scale", type=float, metavar="S", help="factor of the adapters (20.0); or --alpha")
    group.add_argument("--alpha", type=float, metavar="A", help="scale as alpha / rank, or alpha / sqrt(rank)")
    group.add_argument("--rslora", action=YES_OR_NO, default=None, help="scale is alpha / sqrt(rank)")
    group.add_argument("--dropout", type=float, metavar="P", help="of the adapters' inputs (0.0)")
    group.add_argument(
        "--embedding",
        choices=EMBEDDING_KINDS,
        help="adapt the embedding: input (the tied output head stays, as Apple trained), both, or none (default)",
    )


def _add_optimizer_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--optimizer", choices=OPTIMIZERS, help="(adam); options under optimizer_config in the file")
    group.add_argument("--learning-rate", type=float, metavar="LR", help="the peak, where there is a schedule (1e-5)")
    group.add_argument("--schedule", choices=SCHEDULES, help="of the learning rate, over the run (constant)")
    group.add_argument("--warmup", type=float, metavar="N", help="updates until the peak, or below 1 a share of all")
    group.add_argument("--warmup-init", type=float, metavar="LR", help="learning rate of the first update (0)")
    group.add_argument("--clip-grad-norm", type=float, metavar="NORM", help="shorten longer gradients to this length")
    group.add_argument("--z-loss", type=float, metavar="Z", help="weight of the squared log normaliser (0; Apple 1e-4)")


def _add_loop_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--batch-size", type=int, metavar="N", help="rows of an iteration (4)")
    group.add_argument("--iters", type=int, metavar="N", help="iterations in total, also with --resume (1000)")
    group.add_argument("--epochs", type=float, metavar="N", help="how often every row is seen, instead of --iters")
    group.add_argument("--grad-accumulation-steps", type=int, metavar="N", help="iterations of an update (1)")
    group.add_argument("--grad-checkpoint", action=YES_OR_NO, default=None, help="less memory, more time")
    group.add_argument("--val-batches", type=int, metavar="N", help="batches of a validation (25; -1 all, 0 none)")
    group.add_argument("--steps-per-eval", type=int, metavar="N", help="iterations between validations (200)")
    group.add_argument("--early-stopping", type=int, metavar="N", help="stop after N validations without a gain")
    group.add_argument("--test-batches", type=int, metavar="N", help="batches of the test (500; -1 all)")
    group.add_argument("--seed", type=int, metavar="N", help="of adapters, data order and dropout (0)")
    group.add_argument(
        "--clear-cache-threshold", type=size, metavar="SIZE", help="keep freed buffers up to this size, as 2GB (0)"
    )


def _add_output_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--adapter-path", metavar="DIR", help="where adapters, state and log go (adapters)")
    group.add_argument("--resume-adapter-file", metavar="FILE", help="begin a new run with these adapter weights")
    group.add_argument("--save-every", type=int, metavar="N", help="iterations between saves (100)")
    group.add_argument("--steps-per-report", type=int, metavar="N", help="iterations between reports (10)")
    group.add_argument("--plot", metavar="FILE", help="draw the loss curves afterwards; needs openelm-mlx[plot]")
    group.add_argument("--report-to", metavar="NAMES", help="wandb, swanlab, or both with a comma")
    group.add_argument("--project-name", metavar="NAME", help="at those services")
    group.add_argument("--json", action="store_true", help="print the result as one JSON object")


def size(text: str) -> int:
    """Bytes, written as 500000, 500MB or 2GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 2GB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])
