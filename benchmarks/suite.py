"""A whole run of `openelm bench`: every model, in every precision, at every shape, and what else was asked for.

What is finished stays when the run is interrupted.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import GenerationError, OpenELMError
from ..model import Model
from . import paper
from .device_limits import DeviceLimits, measure_limits
from .matrix import Precision, Source
from .measure import Interrupted, measure_in_turns, session
from .progress import Progress
from .results import BenchResult
from .session import Method, Session, Shape, precision

if TYPE_CHECKING:
    from .layer_profile import LayerProfile


@dataclass(frozen=True)
class Plan:
    """What to measure, checked before anything is loaded. `shapes` are those of each source, in order."""

    sources: Sequence[Source]
    precisions: Sequence[Precision]
    shapes: Sequence[Sequence[Shape]]
    method: Method
    norms: bool = False
    compare: bool = False
    limits: bool = True
    profile: bool = False
    paper: bool = False

    def __post_init__(self) -> None:
        if self.compare and self.norms:
            raise GenerationError("--norms and --compare are two measurements: make two runs")
        if self.norms and self.method.decoder != "eager":
            raise GenerationError(
                "--norms measures the eager step, a compiled one keeps its kernels: leave out --decoder"
            )
        for source, shapes in zip(self.sources, self.shapes, strict=True):
            source.check(list(self.precisions))
            if self.method.decoder != "eager" and any(shape.batch_size > 1 for shape in shapes):
                raise GenerationError("--decoder compiled serves single texts: leave out --batch-size")
            if self.compare and (source.folder is None or self.precisions != [Precision()]):
                raise GenerationError("--compare measures a folder as it is: leave out --size, --dtype and --q-bits")
            if self.compare and source.adapter_path is not None:
                raise GenerationError("--compare measures a folder as it is: leave out --adapter-path")
            if (self.compare or self.norms) and any(shape.batch_size > 1 for shape in shapes):
                raise GenerationError("--compare and --norms measure single texts: leave out --batch-size")

    @property
    def sides(self) -> int:
        """How many take turns at each shape."""
        return 3 if self.norms else 2 if self.compare else 1


@dataclass
class Outcome:
    """Results with what belongs to them, as the JSON object has it, in the order in which they were measured."""

    measured: list[tuple[BenchResult, dict[str, Any]]] = field(default_factory=list)
    profiles: "list[tuple[str, str, LayerProfile]]" = field(default_factory=list)
    interrupted: bool = False
    failure: OpenELMError | None = None  # what ended the run before its end, where there were results to keep

    def to_dicts(self) -> list[dict[str, Any]]:
        """The `results` of a record."""
        return [{**result.to_dict(), **more} for result, more in self.measured]


def run(plan: Plan, progress: Progress) -> Outcome:
    """Measure everything. On Ctrl-C, or when a later model fails, what there is so far, marked as interrupted."""
    outcome = Outcome()
    try:
        for source, shapes in zip(plan.sources, plan.shapes, strict=True):
            for model, foreign_bytes in source.models(plan.precisions):
                _measure_model(plan, source, model, foreign_bytes, shapes, progress, outcome)
                del model
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, Interrupted):
            outcome.measured += [(result, {}) for result in interrupt.results]
        outcome.interrupted = True
    except OpenELMError as error:
        if not outcome.measured:
            raise
        outcome.interrupted, outcome.failure = True, error
    return outcome


def _measure_model(
    plan: Plan,
    source: Source,
    model: Model,
    foreign_bytes: int,
    shapes: Sequence[Shape],
    progress: Progress,
    outcome: Outcome,
) -> None:
    make = _sides(plan, source, model, foreign_bytes)
    results: list[BenchResult] = []
    for shape in shapes:
        tell = progress.shape(shape, plan.method.trials, plan.sides)
        results = measure_in_turns(make(shape), tell)
        outcome.measured += [(result, _more(plan, source, result)) for result in results]
    if plan.limits and not plan.norms:  # a limit is no norm's
        tell(f"{source.name}: limits of this device")
        _add_limits(measure_limits(model), model, outcome.measured[-len(shapes) * len(results) :])
    if plan.profile:
        from .layer_profile import profile

        for shape in shapes:
            tell(f"{source.name}: time of each layer")
            outcome.profiles.append((source.name, precision(model), profile(model, shape)))


def _sides(plan: Plan, source: Source, model: Model, foreign_bytes: int) -> Callable[[Shape], list[Session]]:
    """Who takes turns at a shape: this model alone, with three norms, or with mlx-lm."""
    if plan.norms:
        from .norms import norm_sessions

        return lambda shape: norm_sessions(model, source.name, shape, plan.method, foreign_bytes)
    if plan.compare:
        from .compare import compared_sessions

        return compared_sessions(model, source, plan.method)
    return lambda shape: [session(model, source.name, shape, plan.method, foreign_bytes=foreign_bytes)]


def _more(plan: Plan, source: Source, result: BenchResult) -> dict[str, Any]:
    return {"paper": paper.to_dict(result, source.config)} if plan.paper else {}


def _add_limits(limits: DeviceLimits, model: Model, measured: Sequence[tuple[BenchResult, dict[str, Any]]]) -> None:
    for result, more in measured:
        if not result.variant:  # a share is this project's, with its own norms
            more["limits"] = {"device": asdict(limits), **limits.shares(result, model)}
