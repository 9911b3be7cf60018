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
