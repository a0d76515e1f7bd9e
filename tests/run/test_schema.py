"""A field of the config has one place: default, bounds, help, identity and page."""

import importlib.util
import operator
import re
from pathlib import Path

import pytest
from absl import flags

from acco_jax.run.build.validation import validate
from acco_jax.run.config import field_checks, identity, parsing, schema, usage
from acco_jax.run.config.fields import default_config
from acco_jax.run.config.schema import FIELDS, Field
from acco_jax.step import FORMS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page():
    path = ROOT / "benchmarks" / "config_page.py"
    spec = importlib.util.spec_from_file_location("config_page", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program.page


def help_text():
    defined = flags.FlagValues()
    parsing.config_flag(defined)
    return usage.text("", {}, defined)


def test_a_new_field_is_added_in_one_place(page, monkeypatch):
    doc = "Steps of a cooling at the end. The learning rate is 0 in them."
    field = Field(
        3, doc, least=0, most=7, zero="none", unit="steps", identity=False, help=True
    )
    monkeypatch.setitem(FIELDS, "optimizer.cooling", field)
    config = default_config()
    assert config.optimizer.cooling == 3
    validate(config)
    config.optimizer.cooling = 8
    with pytest.raises(ValueError, match=r"optimizer\.cooling is 8: it must be at mo"):
        validate(config)
    config.optimizer.cooling = -1
    with pytest.raises(ValueError, match=r"optimizer\.cooling is -1: give 0 for none"):
        validate(config)
    del config.optimizer["cooling"]
    with pytest.raises(ValueError, match=r"lacks the field optimizer\.cooling"):
        validate(config)
    shown = " ".join(help_text().split())
    assert "--config.optimizer.cooling Steps of a cooling at the end [3 steps]" in shown
    old, new = ({"optimizer": {"cooling": n}} for n in (1, 2))
    assert identity.differing_field(old, new) == ""
    monkeypatch.setattr(field, "identity", True)
    assert identity.differing_field(old, new) == "optimizer.cooling=1, not 2"
    row = (
        "| `optimizer.cooling` | `3` | int, at least 0, at most 7, 0: none (steps) |  |"
    )
    assert f"{row} {doc} |" in page()


def test_a_new_section_is_added_in_one_place(page, monkeypatch):
    choices = Field("a", "One of two.", choices=("a", "b"))
    monkeypatch.setitem(FIELDS, "made_up.kind", choices)
    monkeypatch.setitem(FIELDS, "made_up.file", Field(None, "A file.", str, place=()))
    config = default_config()
    assert config.made_up.to_dict() == {"kind": "a", "file": None}
    config.made_up.kind = "c"
    with pytest.raises(ValueError, match=r"made_up\.kind is 'c': .*Known: a, b\."):
        field_checks.check(config)
    del config.made_up
    with pytest.raises(ValueError, match=r"config lacks the field made_up\.kind"):
        field_checks.check(config)
    old, new = ({"made_up": {"file": path}} for path in ("/here", "/there"))
    assert identity.differing_field(old, new) == ""
    assert identity.differing_field(old, {"made_up": {}}) != ""
    assert "## `made_up`" in page() and "--config.made_up" not in help_text()


def test_fields_are_written_down():
    for name, field in FIELDS.items():
        assert field.doc.endswith("."), name
        assert field.kind is not object, name
        assert field.form in {"", *field_checks.CHECKS}, name
    assert FIELDS["form"].choices == FORMS
    assert schema.STEPS < schema.INTEGERS


def test_the_page_is_what_the_program_writes(page):
    written = (ROOT / "docs" / "site" / "config.md").read_text()
    assert written == page(), "run python benchmarks/config_page.py"


def test_a_field_that_an_older_config_lacks_has_its_default():
    assert identity.differing_field({}, {"tolerance": 1, "batch": "kept"}) == ""
    assert identity.differing_field({}, {"counts": [], "lora": {"rank": 0}}) == ""
    found = identity.differing_field({}, {"lora": {"rank": 8}})
    assert found == "lora.rank=0, not 8"
    found = identity.differing_field({}, {"batch": "per_worker"})
    assert found == "batch='kept', not 'per_worker'"


LOADING = pytest.mark.filterwarnings("ignore:the load_module")  # of ml_collections


@LOADING
@pytest.mark.parametrize(
    ("field", "given", "value"),
    [
        ("optimizer.options", "{'b2': 0.9}", {"b2": 0.9}),
        ("optimizer.options.b2", "1e-3", 1e-3),
        ("optimizer.groups", "(('w', {'b1': 0.5}),)", (("w", {"b1": 0.5}),)),
        ("model.options.name", "'1e3'", "1e3"),
        ("model.options.name", '"it\'s"', "it's"),
        ("model.options.name", "plain", "plain"),
        ("model.options.text", "other", "other"),  # a text in the file
        ("model.options.text", "'5'", "'5'"),
        ("sample_prompt", "'5'", "'5'"),  # of a text every letter counts
        ("sample_prompt", "", ""),
        ("data.end_of_text", "5", "5"),
        ("first_half", "auto", "auto"),
        ("first_half", "1", 1),
        ("model.scan_layers", "false", False),
        ("counts", "(1, 2)", (1, 2)),
    ],
)
def test_another_process_gets_the_same_config(tmp_path, field, given, value):
    """As the runs of a comparison, and plan's command."""
    factory = "a.b:c" if "options" in field else None  # whose options they are
    (tmp_path / "c.py").write_text(
        "from acco_jax.run.config import fields\ndef get_config():\n"
        "    c = fields.default_config()\n    c.model.options.text = 'a'\n"
        f"    c.model.factory = {factory!r}\n    c.samples = 1\n    return c"
    )
    defined = flags.FlagValues()
    argv = ["", f"--config={tmp_path}/c.py", f"--config.{field}={given}"]
    parsing.config_flag(defined, argv)
    defined(argv)
    arguments = parsing.config_arguments(defined)
    for found in (defined["config"].value, parsing.config_of(arguments)):
        found = operator.attrgetter(field)(found)
        found = found.to_dict() if isinstance(value, dict) else found
        assert found == value and type(found) is type(value)


@LOADING
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import os\nos.environ['NOT_SET']", "KeyError: 'NOT_SET'"),
        ("raise KeyError", "KeyError"),
        ("raise ValueError('first\\nsecond')", "first second"),
        ("raise ValueError('\\n')", "ValueError"),
        ("def get_config():\n    return int('x')", "invalid literal .*: 'x'"),
        (
            "from ml_collections import ConfigDict\ndef get_config():\n"
            "    return ConfigDict({'steps': 1}).step",
            "no such field: .*Did you mean .steps.*",
        ),
    ],
)
def test_an_error_of_a_config_file_is_one_line(tmp_path, text, line):
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(ValueError) as error:
        parsing.config_of([f"--config={tmp_path}/c.py"])
    assert re.fullmatch(line, str(error.value))
