"""Fine-tune a model on your own texts: LoRA or DoRA adapters, or whole weights.

openelm lora --model MODEL --data FOLDER                      the bundled recipe's defaults are mlx-lm's
openelm lora --model MODEL --data FOLDER --recipe laptop      better ones for a laptop
openelm lora --resume --adapter-path adapters                 go on, as if never stopped
openelm lora --model MODEL --data FOLDER --dry-run            what would be trained, and the memory it takes
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..home import expand_home
from .arguments import add_arguments
from .settings_sources import read_settings, read_yaml

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["add_arguments", "run"]

# What may change when a run goes on: nothing of this changes what an update computes.
_FREE = (
    "iters", "epochs", "save_every", "steps_per_eval", "steps_per_report", "val_batches", "test", "test_batches",
    "early_stopping", "report_to", "project_name", "clear_cache_threshold", "train", "offline", "adapter_path",
    "data", "model", "tokenizer", "revision",  # may have moved; they are known by their fingerprints
)  # fmt: skip
_ADAPTERS_ONLY = ("keys", "rank", "scale", "alpha", "rslora", "dropout")  # flags that "full" has no use for


def run(args: argparse.Namespace) -> int:
    """Status 1 for a run that failed, 130 where it was interrupted; results on stdout."""
    from .parallel import rank
    from .report import tell

    settings, record = _settings(args)
    if settings.model is None:
        tell("no --model given, using the bundled 'tiny'; a real one: --model apple/OpenELM-270M")
    from . import job

    if args.show_batch:
        job.show_first_batch(settings)
        return 0
    if args.dry_run:
        _print(job.dry_run(settings), as_json=args.json)
        return 0
    _check_outputs(args, settings)
    result: dict[str, Any] = {}
    if settings.trains:
        result |= job.train_adapters(settings, record, force=args.force)
    if args.plot:
        from .log import plot_loss

        plot_loss(Path(settings.adapter_path), Path(args.plot))
    if settings.test:
        result |= job.test_adapters(settings)
    if rank() == 0:
        _print(result, as_json=args.json)
    return 0


def _check_outputs(args: argparse.Namespace, settings: "Settings") -> None:
    """Raise, before hours of work and before earlier adapters are replaced, for what would fail after it."""
    from .data_sources import check_test_data
    from .report import service_modules

    if args.plot:
        from .log import LOG_NAME, check_plot

        check_plot(Path(args.plot))
        if not settings.trains and not (Path(settings.adapter_path) / LOG_NAME).is_file():
            raise ConfigError(f"--plot draws the log of a run, and {settings.adapter_path} has no {LOG_NAME}")
    if settings.trains:
        service_modules(settings.report_to)
    if settings.test:
        check_test_data(settings.data, trained=settings.trains)


def _settings(args: argparse.Namespace) -> "tuple[Settings, dict[str, Any] | None]":
    """The settings, and with --resume the record of the run that goes on."""
    if not args.resume:
        settings = read_settings(args)
        ignored = [f"--{name.replace('_', '-')}" for name in _ADAPTERS_ONLY if getattr(args, name) is not None]
        if ignored and settings.fine_tune_type == "full":
            raise ConfigError(f"{', '.join(ignored)} would be ignored: with fine_tune_type full there are no adapters")
        return settings, None
    if args.force:
        raise ConfigError("--resume goes on with a run and --force replaces it: choose one")
    if args.resume_adapter_file:
        raise ConfigError("--resume goes on with a run and --resume-adapter-file begins a new one: choose one")
    from .state import read_record

    folder = args.adapter_path or (read_yaml(Path(args.config)).get("adapter_path") if args.config else None)
    path = expand_home(folder or "adapters")
    record = read_record(path)
    stored = {**record["settings"], "adapter_path": str(path), "train": True}  # --resume --test tests afterwards
    settings = read_settings(args, stored)
    changed = [
        f"{key} was {stored[key]!r} and is {value!r}"
        for key, value in settings.to_dict().items()
        if key not in _FREE and key in stored and stored[key] != value
    ]
    if changed:
        raise ConfigError(
            f"a resumed run keeps its settings: {'; '.join(changed)}; leave that out, or begin a new run with "
            "--resume-adapter-file"
        )
    return settings, record


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    if "test_loss" in result:
        print(f"test loss {result['test_loss']:.4f}, perplexity {result['test_perplexity']:.3f}")
    if "memory_bytes" in result:
        for line in _plan(result):
            print(line)
    if "adapter_path" in result:
        print(f"{result['adapter_path']}: adapters of iteration {result['iteration']}")


def _plan(result: dict[str, Any]) -> list[str]:
    """What --dry-run found, for people."""
    rows, length = result["largest_batch"]
    rates = ", ".join(f"{rate:.3g}" for rate in result["learning_rates"])
    return [
        f"trainable parameters  {result['trainable_parameters']:,} of {result['parameters']:,}",
        f"targets               {result['targets']}",
        f"tokens                {result['epoch_tokens']:,} an epoch, {result['tokens']:,} in all",
        f"steps                 {result['iterations']:,} iterations, {result['updates']:,} updates",
        f"learning rate         {rates} (first, middle and last update)",
        f"memory                {result['memory_bytes'] / 1e9:.2f} GB, {result['weights_bytes'] / 1e9:.2f} GB of them "
        f"weights, with batches of {rows} x {length} tokens; {result['device']}",
    ]
