"""The shape of the house: sizes of files and functions, and what may name a concrete implementation."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "torchspec").rglob("*.py")}
MOST_LINES = 20_000


def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (name, node)
        for name, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def is_op_schema(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """torch.library reads an op's schema from the signature of the function that defines or fakes it."""
    text = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return "custom_op" in text or "register_fake" in text


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton and numba compile a function as it stands: pointers, strides and sizes are its parameters."""
    text = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return "triton" in text or "jit" in text


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([a for a in named if a.arg not in ("self", "cls")])


def test_files_are_short() -> None:
    lengths = {name: text.count("\n") for name, text in FILES.items()}
    assert not {name: n for name, n in lengths.items() if n > 400}
    assert sum(lengths.values()) < MOST_LINES


def test_functions_are_short() -> None:
    lengths = sorted(node.end_lineno - node.lineno + 1 for _, node in functions())
    assert statistics.median(lengths) <= 8
    assert lengths[int(0.95 * len(lengths))] <= 32


def test_functions_take_at_most_nine_parameters() -> None:
    many = {
        f"{name}: {node.name}": n
        for name, node in functions()
        if (n := parameters(node)) > 9 and not is_op_schema(node) and not is_kernel(node)
    }
    assert not many


# What is concrete, and the one module that may import it. An entry counts once its registry exists.
REGISTRIES = {
    "torchspec.drafts.eagle3": "torchspec.drafts.registry",
    "torchspec.attention.transports": "torchspec.attention.transports.registry",
    "torchspec.speculation.budgets": "torchspec.speculation.budgets.registry",
    "torchspec.rollout.vllm": "torchspec.rollout.registry",
}
SHARED = {"base", "registry", "choose"}
"""Modules of a concrete folder that anybody may import."""


def modules() -> dict[str, str]:
    return {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): name for name in FILES}


def imported(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(text)))
    plain = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    origins = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    return plain | {f"{n.module}.{alias.name}" for n in origins for alias in n.names}


def test_nothing_imports_a_concrete_draft_engine_transport_or_budget_but_its_registry() -> None:
    found = modules()
    assert REGISTRIES["torchspec.drafts.eagle3"] in found
    wrong = []
    for folder, registry in REGISTRIES.items():
        if registry not in found:
            continue
        concrete = {m for m in found if m == folder or m.startswith(f"{folder}.")}
        concrete -= {f"{folder}.{name}" for name in SHARED}
        if registry.startswith(folder):
            concrete.discard(folder)
        for module, file in found.items():
            if module != registry and module not in concrete:
                targets = {t for t in imported(FILES[file]) for c in concrete if f"{t}.".startswith(f"{c}.")}
                wrong += [f"{module} imports {target}" for target in targets]
    assert not wrong
