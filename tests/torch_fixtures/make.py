"""Writes the files beside it, with PyTorch: `python tests/torch_fixtures/make.py` (2.13.0 wrote those committed).

tests/test_torch_file.py knows what is in them, and runs this again where PyTorch is installed.
"""

import warnings
from pathlib import Path
from typing import Any

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"]
DTYPES += ["uint64", "uint32", "uint16", "uint8", "bool"]


def write_all(folder: Path) -> None:
    """Write every file into `folder`."""
    import torch

    torch.manual_seed(0)
    torch.save({name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in DTYPES}, folder / "dtypes.pt")
    torch.save(_views(torch), folder / "views.pt")
    torch.save(_training(torch), folder / "training.pt")
    torch.save(_legacy(torch), folder / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"weight": torch.zeros(2, 3).to(torch.float8_e4m3fn)}, folder / "float8.pt")
    torch.save({"weight": torch._neg_view(torch.ones(3))}, folder / "negated.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(torch.nn.Linear(2, 3), folder / "module.pt")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), str(folder / "script.pt"))


def _views(torch: Any) -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32)
    table = base.reshape(4, 6)
    return {
        "base": base,
        "table": table,
        "transposed": table.T,
        "rows": table[1:3],
        "columns": table[:, 1::2],
        "permuted": base.reshape(2, 3, 4).permute(2, 0, 1),
        "expanded": base[5:6].expand(3, 2),
        "diagonal": table.diagonal(),
        "scalar": base[7],
        "empty": torch.empty(0, 3),
        "no columns": table[:, :0],
        "parameter": torch.nn.Parameter(table[2]),
    }


def _training(torch: Any) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "iterations": 2**40,
        "model_state_dict": model.state_dict(),
        "optim_state_dict": optimizer.state_dict(),
        "best_metric": -1.5,
        "done": True,
        "nothing": None,
        "shape": torch.Size((2, 3)),
        "dtype": torch.bfloat16,
    }


def _legacy(torch: Any) -> dict[str, Any]:
    base = torch.arange(12, dtype=torch.bfloat16)
    return {
        "base": base,
        "transposed": base.reshape(3, 4).T,
        "other": torch.arange(3, dtype=torch.int64),
        "unsigned": torch.arange(4).to(torch.uint16),
    }


if __name__ == "__main__":
    write_all(Path(__file__).parent)
