"""What keeps the code readable: who may know whom, and how long things are."""

import ast
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "acco_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
LINES = 500  # of a file, at most
MEDIAN = 20  # lines of a function

# Imported where they are used: they are optional, slow, or must follow a set-up.
LATE = re.compile(
    r"array_record|cloudpickle|flax|jax\.experimental|matplotlib|pyarrow|sentencepiece|"
    r"tensorboardX|tensorflow\w*|tokenizers|torch|transformers|libtpu|numpy|"
    r"acco_jax\.(plan|runner)\."
)


def name_of(path):
    """The module that a file of the package is."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imported(node):
    """The modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & MODULES.keys()
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return set()
    members = {f"{node.module}.{alias.name}" for alias in node.names}
    inside = members & MODULES.keys()
    # `from package import member` needs the package only for what is no module
    whole = {node.module} & MODULES.keys() if members - inside else set()
    return inside | whole


def statements(tree):
    """The statements of a module that run when it is imported."""
    for node in tree.body:
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not guarded:
            yield node


def edges():
    return {
        name_of(path): set().union(*map(imported, statements(tree)), set())
        for path, tree in TREES.items()
    }


def circle(graph):
    """A circle of a graph, as a list of names; [] if there is none."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for other in sorted(graph[name]):
            if found := visit(other):
                return found
        done.add(path.pop())
        return []

    return next((found for name in sorted(graph) if (found := visit(name))), [])


def test_a_circle_is_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    known = edges()
    assert "acco_jax.half_round" in known["acco_jax.methods.sharded"]


def test_no_import_circle():
    assert circle(edges()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_long_file(path):
    assert len(path.read_text().splitlines()) <= LINES


def functions():
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield node


def test_functions_are_short():
    lengths = [node.end_lineno - node.lineno + 1 for node in functions()]
    assert len(lengths) > 500
    assert statistics.median(lengths) <= MEDIAN


def test_imports_stand_at_the_top():
    late = []
    for node in functions():
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import):
                late += [alias.name for alias in inner.names]
            elif isinstance(inner, ast.ImportFrom):
                late.append(f"{inner.module}.{inner.names[0].name}")
    assert [name for name in late if not LATE.match(name)] == []


def test_nothing_but_methods_knows_what_kind_of_method_there_is():
    kinds = {"ShardedMethod", "LocalMethod"}
    for path, tree in TREES.items():
        if PACKAGE / "methods" not in path.parents:
            names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            assert not names & kinds, path
