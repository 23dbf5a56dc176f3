"""docs/quantization.md: its bytes follow from the plan of each row's flags, and the script measures as it says."""

import argparse
import json
import re
from pathlib import Path

import pytest
from artefacts import tiny_config

from openelm_mlx.benchmarks import quantization
from openelm_mlx.benchmarks.quantization import GROUPS
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert.command import add_arguments
from openelm_mlx.convert.packing import Packing
from openelm_mlx.memory import weight_bytes

TEXT = (Path(__file__).parent.parent / "docs" / "quantization.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]*)` \| ([\d.]+) \| ([\d,]+) \| [\d.]+ \| [\d.]+ \|$", TEXT, re.MULTILINE)


def test_every_row_of_the_script_is_there():
    flags = [" ".join(row) or "(bfloat16)" for rows in GROUPS.values() for row in rows]
    assert sorted(row[0] for row in ROWS) == sorted(flags)


@pytest.mark.parametrize(("flags", "bits", "nbytes"), ROWS, ids=[row[0] for row in ROWS])
def test_bits_and_bytes_are_those_of_the_plan(flags, bits, nbytes):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["tiny", *(flags.split() if flags.startswith("-") else [])])
    packing = Packing(
        quantize=args.quantize,
        q_bits=args.q_bits[0] if args.q_bits else None,
        embedding_bits=args.embedding_bits,
        recipe=args.recipe or "uniform",
    )
    config = OpenELMConfig.from_dict(tiny_config())
    expected = weight_bytes(config, packing.planned(config))
    assert (int(nbytes.replace(",", "")), bits) == (expected, f"{8 * expected / config.num_parameters():.2f}")


def test_memory_of_gptq_is_what_it_asks_for():
    from openelm_mlx.convert.gptq import needed_bytes

    stated = re.search(
        r"about ([\d.]+) GB of memory for 270M, ([\d.]+) for 450M, ([\d.]+) for 1.1B, ([\d.]+) for 3B", TEXT
    )
    sizes = [OpenELMConfig.from_name(name) for name in ("270M", "450M", "1.1B", "3B")]
    assert [float(text) for text in stated.groups()] == pytest.approx([needed_bytes(c) / 1e9 for c in sizes], rel=0.02)


def test_the_script_measures_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(GROUPS, "embedding", [(), ("-q", "--q-bits", "2"), ("-q", "--q-bits", "8")])
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- embedding -->\nold\n<!-- /embedding -->\nb\n")
    monkeypatch.setattr(quantization, "PAGE", page)
    assert quantization.main(
        ["--tokens", "60", "--group", "embedding", "--write-docs", "--json", str(tmp_path / "q.json")]
    ) == 0  # fmt: skip
    figures = json.loads((tmp_path / "q.json").read_text())
    plain, coarse, fine = figures["embedding"]
    assert plain["perplexity"] == pytest.approx(figures["float32_perplexity"], rel=1e-4)
    assert plain["kl"] < fine["kl"] < 0.01 < coarse["kl"]
    assert figures["tokens"] == 60
    text = page.read_text()
    assert text.startswith("a\n<!-- embedding -->")
    assert text.endswith("<!-- /embedding -->\nb\n")
    assert "`-q --q-bits 2`" in text
    assert "old" not in text
    assert "60 tokens" in capsys.readouterr().out
