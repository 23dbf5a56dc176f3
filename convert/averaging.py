"""The mean of several checkpoints of one training, as Apple made `checkpoint_average.pt` of the last five."""

from collections.abc import Sequence
from dataclasses import replace

from ..config_keys import listing
from ..errors import CheckpointError
from .computed import mean
from .sources import Source


def average(sources: Sequence[Source]) -> Source:
    """One source whose tensors are the mean of all, taken in float64 and rounded back to their dtype.

    Raises one CheckpointError that lists what differs: names, shapes and dtypes must agree.
    """
    first, *others = sources
    if not others:
        raise CheckpointError(f"an average needs two checkpoints or more; got only {first.path}")
    for source in sources:
        if source.quantization is not None or source.adapter is not None:
            kind = "is quantized" if source.adapter is None else "holds an adapter"
            raise CheckpointError(f"{source.path} {kind}, so it has no mean with others; name plain checkpoints")
    for other in others:
        _check_alike(first, other)
    tensors = {name: mean([source.tensors[name] for source in sources]) for name in first.tensors}
    return replace(first, tensors=tensors, training={}, is_computed=True)


def _check_alike(first: Source, other: Source) -> None:
    one, two = first.tensors, other.tensors
    faults = [f"{name} is in one of them only" for name in one.keys() ^ two.keys()]
    for name in (name for name in one if name in two):
        a, b = one[name], two[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            faults.append(f"{name} is {a.dtype} {a.shape} and {b.dtype} {b.shape}")
    if faults:
        raise CheckpointError(
            f"{first.path} and {other.path} are not checkpoints of one training: {listing(sorted(faults))}"
        )
