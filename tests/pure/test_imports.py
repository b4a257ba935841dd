"""Who may import whom: each part uses only what stands below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# part -> parts that it may import besides itself, as section 8 of the design lists them.  Single modules are parts too.
BASE = {"errors", "layout", "cluster", "program", "plan"}
KERNELS = {"runtime.kernels", "runtime.collectives"}  # passes and rules name functions that run, nothing that trains
ALLOWED = {
    "errors": set(),
    "layout": set(),
    "cluster": {"errors"},
    "program": {"errors", "layout"},
    "plan": {"errors", "layout", "explain"},  # explain: only inside Plan.explain()
    "testing": {"errors"},
    "capture": {"errors", "program"},
    "rules": BASE | KERNELS,
    "cost_model": BASE | {"rules"},
    "modes": BASE | {"rules", "passes.fold"},
    "solver": BASE | {"rules", "cost_model", "passes.fold", "modes"},
    "passes": BASE | {"rules", "cost_model.collectives"} | KERNELS | {"runtime.parameters", "runtime.standalone"},
    "runtime": BASE,
    "explain": BASE | {"cost_model"},
    "progress": {"errors"},
    "doctor": {"errors", "cluster", "cost_model", "explain"},
    "models": {"errors"},
}
PARTS = sorted(ALLOWED)
TOP = {"__init__", "api", "cli", "profiling", "verify"}  # use all


def sources(part: str) -> list[Path]:
    """The part's files: a module or a folder of ``autopar``, or a top-level folder that is mapped into it."""
    for base in (ROOT / "autopar" / part, ROOT / part):
        if base.is_dir():
            return sorted(base.rglob("*.py"))
        if base.with_suffix(".py").exists():
            return [base.with_suffix(".py")]
    raise FileNotFoundError(part)


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module below autopar) of every import, those inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names = [a.name for a in node.names]
            found += [(node.lineno, f"autopar.{n}") for n in names] if node.module == "autopar" else []
            found += [(node.lineno, node.module)] if node.module and node.module != "autopar" else []
    return [(line, name.removeprefix("autopar.")) for line, name in found if name.startswith("autopar.")]


def is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


@pytest.mark.parametrize("part", PARTS)
def test_parts_import_only_what_is_below_them(part: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports autopar.{name}"
        for path in sources(part)
        for line, name in imports(path)
        if not any(is_within(name, allowed) for allowed in {part} | ALLOWED[part])
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_a_part_or_may_use_all() -> None:
    found = {p.stem for p in (ROOT / "autopar").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    found |= {p.name for p in (ROOT / "passes", ROOT / "cost_model")}
    assert found <= set(PARTS) | TOP
