"""Measure tokens/s: prefill and decode apart, medians with an interval over several trials after a warm-up.

The prompt is a fixed list of ids, decoding is greedy, and EOS is ignored: every trial does the same work. Several
models, precisions, lengths and batch sizes make a matrix; what is finished is kept on Ctrl-C.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import GenerationError, OpenELMError, RecordError
from .arguments import add_arguments as add_arguments
from .arguments import positive_count as positive_count
from .record import machine as machine
from .record import new_record, read_record

if TYPE_CHECKING:
    from .baseline import Verdict
    from .matrix import Source
    from .suite import Outcome, Plan

INTERRUPTED = 130
_DEFAULT_TRIALS = 5


def run(args: argparse.Namespace) -> int:
    """Measure, print, compare. Status 1 for a regression, 130 when interrupted."""
    if args.action == "report":
        from .report import run_report

        return run_report(args)
    if args.output is not None:
        from ..atomic_file import check_file_target

        check_file_target(args.output)
    if args.train:
        from .train import run_train

        return run_train(args)
    baseline = None if args.baseline is None else read_record(args.baseline)
    plan = make_plan(args)
    if baseline is not None:
        _check_baseline(baseline, plan, str(args.baseline))
    _tell_assumed(args, plan)
    outcome = _measure(plan)
    record = _record(args, plan, outcome)
    verdicts: list[Verdict] = []
    failure: OpenELMError | None = outcome.failure
    if baseline is not None and not outcome.interrupted:
        from .baseline import compare_records

        try:
            verdicts = compare_records(record, baseline, str(args.baseline))
            record["baseline"] = [verdict.to_dict() for verdict in verdicts]
        except RecordError as error:  # another precision, or the mains unplugged: what was measured is still true
            failure = error
    write_and_print(record, args.output, args.json)
    if not args.json:
        _print(plan, outcome, record, verdicts)
    if failure is not None:
        raise failure
    if outcome.interrupted:
        tell_kept(len(outcome.measured))
        return INTERRUPTED
    return 1 if any(verdict.is_regression for verdict in verdicts) else 0


def make_plan(args: argparse.Namespace) -> "Plan":
    """What the flags ask for, checked; models are looked up, not loaded."""
    from . import paper
    from .matrix import precisions_of, shapes_for
    from .session import MAX_WARM_UPS, Method
    from .suite import Plan

    if args.paper:
        _refuse_with_paper(args)
    if args.size and args.adapter_path is not None:
        raise GenerationError("--adapter-path belongs to the model it was trained for: leave out --size")
    sources = _sources(args)
    if args.paper:
        shapes = [[paper.SHAPE] for _ in sources]
        for source in sources:
            paper.check_context(source.name, source.config.max_context_length)
    else:
        lengths = (args.prompt_tokens, args.generation_tokens, args.batch_size or [1])
        shapes = [shapes_for(*lengths, source.config.max_context_length) for source in sources]
    trials = args.num_trials or (paper.TRIALS if args.paper else _DEFAULT_TRIALS)
    method = Method(trials, args.delay, args.decoder, paper.WARM_UPS if args.paper else MAX_WARM_UPS)
    return Plan(
        sources,
        precisions_of(args.dtype, args.q_bits),
        shapes,
        method,
        norms=args.norms,
        compare=args.compare is not None,
        limits=not args.no_limits,
        profile=args.profile,
        paper=args.paper,
    )


def write_and_print(record: dict[str, Any], output: Path | None, to_stdout: bool) -> None:
    """The JSON object, to a file that appears whole and to stdout, where asked for."""
    if output is not None:
        from ..atomic_file import new_file

        with new_file(output) as partial:
            partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if to_stdout:
        print(json.dumps(record))


def _sources(args: argparse.Namespace) -> "list[Source]":
    from .matrix import Source

    names = args.model or ([] if args.size else ["tiny"])
    settings = {"adapter_path": args.adapter_path, "keep_quantized": args.keep_quantized}
    named = [Source.named(name, revision=args.revision, offline=args.offline, **settings) for name in names]
    return named + [Source.random(size) for size in args.size or []]


def _measure(plan: "Plan") -> "Outcome":
    from .progress import progress, total_cost
    from .suite import run as run_suite

    shapes = [shape for shapes in plan.shapes for shape in shapes] * len(plan.precisions)
    with progress(total_cost(shapes, plan.method.trials, plan.sides)) as shown:
        return run_suite(plan, shown)


def _record(args: argparse.Namespace, plan: "Plan", outcome: "Outcome") -> dict[str, Any]:
    more: dict[str, Any] = {"interrupted": outcome.interrupted}
    if outcome.profiles:
        more["profile"] = [
            {"model": name, "precision": held, **found.to_dict()} for name, held, found in outcome.profiles
        ]
    if plan.compare:
        from .compare import comparisons

        more["comparison"] = comparisons([result for result, _ in outcome.measured])
    return new_record(outcome.to_dicts(), settings(args, plan), **more)


def settings(args: argparse.Namespace, plan: "Plan") -> dict[str, Any]:
    """What was really in effect, defaults worked out."""
    return {
        "models": [source.name for source in plan.sources],
        "precisions": [str(precision) for precision in plan.precisions],
        "shapes": [[vars(shape) for shape in shapes] for shapes in plan.shapes],
        "num_trials": plan.method.trials,
        "delay_s": plan.method.delay_s,
        "decoder": plan.method.decoder,
        "max_warm_ups": plan.method.max_warm_ups,
        "keep_quantized": args.keep_quantized,
        "adapter": args.adapter_path is not None,
        "sampling": "greedy",
        "eos": "ignored",
        "protocol": "paper" if plan.paper else "openelm bench",
    }


def _print(plan: "Plan", outcome: "Outcome", record: dict[str, Any], verdicts: list[Any]) -> None:
    from . import table

    if outcome.measured:
        table.print_results(outcome.measured)
    if plan.norms:
        _print_norms(plan, outcome)
    if plan.compare:
        table.print_comparisons(record["comparison"])
    for name, held, found in outcome.profiles:
        table.print_profile(f"{name}, {held}", found)
    for verdict in verdicts:
        print(verdict)


def _print_norms(plan: "Plan", outcome: "Outcome") -> None:
    from . import table
    from .norms import norm_count

    counts = {source.name: norm_count(source.config) for source in plan.sources}
    results = [result for result, _ in outcome.measured]
    for start in range(0, len(results), plan.sides):
        sides = results[start : start + plan.sides]
        table.print_norms(sides, counts[sides[0].model])


def _check_baseline(baseline: dict[str, Any], plan: "Plan", where: str) -> None:
    """Raise RecordError, before anything is measured, for a file that this run cannot be held against."""
    from .baseline import check_conditions, check_works

    works = [
        {"model": source.name, "decoder": plan.method.decoder, **vars(shape)}
        for source, shapes in zip(plan.sources, plan.shapes, strict=True)
        for shape in shapes
    ]
    check_works(baseline, works, where)
    check_conditions(baseline, machine(), where)


def tell_tiny() -> None:
    """Say which model stands in where none was named."""
    print(
        "openelm: no --model given, using the bundled 'tiny'; a real one: --model apple/OpenELM-270M-Instruct",
        file=sys.stderr,
    )


def tell_kept(results: int) -> None:
    """Say what an interruption left."""
    left = {0: "there is no result yet", 1: "1 result is kept"}.get(results, f"{results} results are kept")
    print(f"openelm: interrupted; {left}", file=sys.stderr)


def _tell_assumed(args: argparse.Namespace, plan: "Plan") -> None:
    """Say which model stands in for none, and where a default length did not fit into a model's context."""
    from .matrix import DEFAULT_GENERATION_TOKENS, DEFAULT_PROMPT_TOKENS

    if not args.model and not args.size:
        tell_tiny()
    if plan.paper:
        return
    for source, chosen in zip(plan.sources, plan.shapes, strict=True):
        usual = (args.prompt_tokens or [DEFAULT_PROMPT_TOKENS], args.generation_tokens or [DEFAULT_GENERATION_TOKENS])
        for shape in chosen:
            if shape.prompt_tokens not in usual[0] or shape.generation_tokens not in usual[1]:
                print(
                    f"openelm: the model's context is {source.config.max_context_length} tokens: "
                    f"{shape.prompt_tokens} prompt tokens and {shape.generation_tokens} generated instead of "
                    f"{usual[0][0]} and {usual[1][0]}",
                    file=sys.stderr,
                )
                break


def _refuse_with_paper(args: argparse.Namespace) -> None:
    """Raise GenerationError for flags that the paper's protocol settles."""
    given = {"-p": args.prompt_tokens, "-g": args.generation_tokens, "-b": args.batch_size, "-n": args.num_trials}
    named = [flag for flag, value in given.items() if value is not None]
    if named:
        raise GenerationError(
            f"--paper is a fixed protocol (36 + 1024 tokens, one text, five runs): leave out {named[0]}"
        )
