"""docs/faults.md says which test keeps each fault away: those tests must exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE)))


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_the_named_test_exists(file, name):
    assert name in names_in(file)


def test_no_row_is_empty():
    rows = re.findall(r"^\| [A-M]\d+ .*\| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 50
    assert all(row.strip() for row in rows)
