"""Which attributes a class's own methods change in place, read from their source.

A dataset that fills its list while it is used (a cache, a running index) must keep a list, and so
must one that checks whether it is a list. The analysis is simple. It follows names that are bound
to the attribute, or to something taken out of it, in the same function. It does not follow calls of
other functions. It errs towards "changed".
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from holdfast.code_origin import module_of

# Methods that create attributes; they have run before the dataset is packed.
_MAKING = frozenset({"__init__", "__new__", "__post_init__", "__setstate__", "__getstate__"})
_OF_LISTS = {"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"}
_OF_DICTS = {"update", "setdefault", "popitem", "__setitem__", "__delitem__", "move_to_end"}
_OF_OTHERS = {"add", "discard", "appendleft", "popleft", "fill", "resize"}
_CHANGING = frozenset(_OF_LISTS | _OF_DICTS | _OF_OTHERS)


@dataclass(frozen=True)
class Change:
    """A line that changes an attribute or an item of it, or that checks its type."""

    method: str
    line: int
    code: str
    only_asks: bool


def changes(kind: type) -> dict[str, Change]:
    """The first change of each attribute of `self` outside of `_MAKING`."""
    found: dict[str, Change] = {}
    for name, function in _methods(kind):
        if name in _MAKING:
            continue
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError):
            continue
        tree = ast.parse(textwrap.dedent("".join(lines)))
        for definition in tree.body:
            if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for attribute, node in _Reader(definition).changed:
                    code = ast.unparse(node)
                    line = first + node.lineno - 1
                    change = Change(name, line, code, _asks_for_type(node))
                    found.setdefault(attribute, change)
    return found


def _asks_for_type(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "type")
        and bool(node.args)
    )


def unreadable(kind: type) -> str | None:
    """A method of the user's whose source cannot be read; None if all can."""
    for name, function in _methods(kind):
        try:
            inspect.getsourcelines(function)
        except (OSError, TypeError):
            return name
    return None


def _methods(kind: type) -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        module = module_of(base)
        if module in ("builtins", "typing", "abc") or module.startswith("torch."):
            continue
        for name, value in vars(base).items():
            if isinstance(value, property):
                value = value.fget
            value = getattr(value, "__func__", value)  # class methods
            value = inspect.unwrap(value) if callable(value) else value
            if inspect.isfunction(value):
                found.setdefault(name, value)
    return [(name, value) for name, value in found.items() if not _is_generated(value)]


def _is_generated(function: object) -> bool:
    """Whether dataclasses or the like generated it: it has no file, and is harmless."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == "<string>" and code.co_name.startswith("__")


class _Reader(ast.NodeVisitor):
    """Collects (attribute, node) for every change of an attribute of `self`."""

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = [*function.args.posonlyargs, *function.args.args]
        self.me = arguments[0].arg if arguments else ""
        self.known: dict[str, str] = {}  # local name -> attribute it came from
        self.changed: list[tuple[str, ast.stmt | ast.expr]] = []
        for _ in range(2):  # in a loop a name may be used above the line that binds it
            self.changed.clear()
            for statement in function.body:
                self.visit(statement)

    def root(self, node: ast.AST) -> str | None:
        """The attribute of `self` that an expression is or is taken out of."""
        while True:
            if isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Name) and node.value.id == self.me:
                    return node.attr
                node = node.value
            elif isinstance(node, (ast.Subscript, ast.Starred)):
                node = node.value
            elif isinstance(node, ast.Call):
                if not isinstance(node.func, ast.Attribute) or node.func.attr not in (
                    "get",
                    "values",
                    "items",
                    "__getitem__",
                ):
                    return None
                node = node.func.value
            elif isinstance(node, ast.Name):
                return self.known.get(node.id)
            else:
                return None

    def _itself(self, node: ast.AST) -> str | None:
        """The attribute of `self` that an expression is; None if it is only taken out of one."""
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return self.root(node) if is_attribute and node.value.id == self.me else None  # type: ignore[attr-defined]

    def _bind(self, target: ast.AST, source: str | None) -> None:
        if isinstance(target, ast.Name):
            if source is not None:
                self.known[target.id] = source
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._bind(part, source)

    def _assigned(self, target: ast.AST, node: ast.stmt) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._assigned(part, node)
        elif isinstance(target, (ast.Subscript, ast.Attribute)):
            attribute = self.root(target)
            if attribute is not None:
                self.changed.append((attribute, node))

    def visit_Assign(self, node: ast.Assign) -> None:
        source = self.root(node.value)
        for target in node.targets:
            self._assigned(target, node)
            self._bind(target, source)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigned(node.target, node)
            self._bind(node.target, self.root(node.value))
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, self.root(node.value))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        attribute = self.root(node.target)
        if attribute is not None:
            self.changed.append((attribute, node))
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._assigned(target, node)

    def visit_For(self, node: ast.For) -> None:
        source = self.root(node.iter)
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name):
            for argument in node.iter.args:  # enumerate, zip, sorted, reversed
                source = source or self.root(argument)
        self._bind(node.target, source)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _CHANGING:
            attribute = self.root(function.value)
            if attribute is not None:
                self.changed.append((attribute, node))
        elif _asks_for_type(node):
            attribute = self._itself(node.args[0])
            if attribute is not None:
                self.changed.append((attribute, node))
        elif isinstance(function, ast.Attribute) and function.attr == "shuffle" and node.args:
            attribute = self.root(node.args[0])
            if attribute is not None:
                self.changed.append((attribute, node))
        self.generic_visit(node)
