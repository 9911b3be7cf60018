"""Which module may import which, and what `import torchspec` may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchspec"

# Lower folders first; a module imports its own folder or those above it in this list (docs/design.md).
ORDER = [
    "errors",
    "records",
    "config",
    "attention",
    "models",
    "distributed",
    "drafts",
    "speculation",
    "data",
    "rewards",
    "environments",
    "rollout",
    "metrics",
    "checkpoint",
    "training",
    "build",
    "trainer",
    "commands",
]
RANK = {name: rank for rank, name in enumerate(ORDER)}
HEAVY = {"vllm", "flash_attn", "triton"}


def modules() -> dict[str, ast.Module]:
    files = {p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py"}
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): ast.parse(p.read_text()) for p in files}


def imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def part(module: str) -> str:
    return module.split(".")[1]


def test_imports_point_downwards() -> None:
    wrong = []
    for name, tree in modules().items():
        for target in imports(tree):
            if target.startswith("torchspec.") and RANK[part(target)] > RANK[part(name)]:
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_there_are_no_cycles() -> None:
    trees = modules()

    def is_type_checking(node: ast.AST) -> bool:
        return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"

    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        runtime = ast.Module([n for n in tree.body if not is_type_checking(n)], [])
        graph[name] = {
            m for t in imports(runtime) for m in (t, t.rpartition(".")[0]) if m in trees and m != name
        }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_heavy_packages_are_imported_inside_functions() -> None:
    """Except in the two modules that are themselves only imported where their package is needed."""
    exempt = {"torchspec.rollout.vllm.weight_transfer", "torchspec.attention.kernels.triton"}
    wrong = []
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom) and name not in exempt:
                wrong += [f"{name}: {t}" for t in imports(ast.Module([node], [])) if t.split(".")[0] in HEAVY]
    assert not wrong


def test_only_the_vllm_folder_imports_vllm() -> None:
    wrong = []
    for name, tree in modules().items():
        if not name.startswith("torchspec.rollout.vllm."):
            wrong += [f"{name}: {target}" for target in imports(tree) if target.split(".")[0] == "vllm"]
    assert not wrong


def test_import_torchspec_is_cheap() -> None:
    code = (
        "import sys, torchspec, torchspec.config.schema, torchspec.records, torchspec.config.load;"
        "print({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_entry_points_import_no_vllm_before_an_engine_is_built() -> None:
    code = "import sys, torchspec.trainer, torchspec.commands.generate; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split()[-1] == "False"


def test_pytest_looks_into_every_folder_of_tests(pytestconfig) -> None:
    """Its own list of folders to leave out has "dist"."""
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    patterns = pytestconfig.getini("norecursedirs")
    assert "dist" in folders
    assert not [f for f in folders for pattern in patterns if fnmatch(f, pattern)]
