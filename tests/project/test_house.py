"""What keeps the code readable: who may know whom."""

import ast
import functools
import re
from pathlib import Path

from benchmarks import mutants, mutations

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "acco_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# Imported where they are used: they are optional, slow, or must follow a set-up.
LATE = re.compile(
    r"array_record|cloudpickle|etils|flax|jax\.experimental|matplotlib|orbax|pyarrow|"
    r"jinja2|sentencepiece|"
    r"tensorboardX|tensorflow\w*|tokenizers|torch|transformers|libtpu|numpy|"
    r"acco_jax\.(command|plan|run|schedule)\."
)


@functools.cache
def trees():
    return {path: ast.parse(path.read_text()) for path in FILES}


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
        for path, tree in trees().items()
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
    assert "acco_jax.core.half_round" in known["acco_jax.methods.sharded"]


def test_no_import_circle():
    assert circle(edges()) == []


def folder(module):
    """The folder that a module is in; a module beside the folders is its own."""
    path = MODULES[module].relative_to(PACKAGE)
    return str(path.parent if len(path.parts) > 1 else path.with_suffix(""))


def test_no_import_circle_of_folders():
    graph = {folder(module): set() for module in MODULES}
    for path, tree in trees().items():  # imports in functions count, too
        others = set().union(*map(imported, ast.walk(tree)), set())
        graph[folder(name_of(path))] |= {folder(other) for other in others}
    assert {"schedule", "run/build"} <= graph["plan"]
    assert "plan" not in graph["audit"] | graph["run"]
    assert circle({name: others - {name} for name, others in graph.items()}) == []


def functions(*but):
    for tree in (tree for path, tree in trees().items() if path.name not in but):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield node


def test_imports_stand_at_the_top():
    late = []
    for node in functions("pytest_plugin.py"):  # comes before a suite's conftest.py
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import):
                late += [alias.name for alias in inner.names]
            elif isinstance(inner, ast.ImportFrom):
                late.append(f"{inner.module}.{inner.names[0].name}")
    assert [name for name in late if not LATE.match(name)] == []


def test_nothing_but_methods_knows_what_kind_of_method_there_is():
    kinds = {"ShardedMethod", "LocalMethod"}
    for path, tree in trees().items():
        if PACKAGE / "methods" not in path.parents:
            names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            assert not names & kinds, path


def test_every_fault_of_the_mutations_has_its_place():
    """`make mutations` takes hours: it should not begin with a stale anchor."""
    assert len(mutants.MUTANTS) == 50
    for mutant in mutants.MUTANTS:
        path, text = mutations.place(mutant)
        changed = text.replace(mutant.before, mutant.after)
        assert changed != text and ast.parse(changed), path
