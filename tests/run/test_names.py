"""Functions that a config names: where they are looked for."""

import sys
import warnings

import pytest
from absl import flags
from absl.testing import flagsaver

from acco_jax.core import names
from acco_jax.plan import __main__ as plan
from acco_jax.run.config import parsing

CONFIG = "from acco_jax.run.config.fields import default_config as get_config\n"


@pytest.mark.parametrize("relative", [True, False])
def test_a_factory_may_lie_beside_the_config(tmp_path, monkeypatch, relative):
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "config.py").write_text(CONFIG)
    module = f"lies_beside_{relative}".lower()
    (folder / f"{module}.py").write_text("def make():\n    return 3\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"'{module}:make'.* config's, or on PYTHONP"):
        names.named("model.factory", f"{module}:make")
    file = "experiments/config.py" if relative else folder / "config.py"
    line = ["plan", f"--config={file}"]
    monkeypatch.setattr(sys, "argv", line)
    with flagsaver.flagsaver(), warnings.catch_warnings():
        # how ml_collections 1.1.0 loads a file
        warnings.filterwarnings("ignore", r"the load_module\(\) method")
        parsing.parser(plan._CONFIG)(line)
    monkeypatch.chdir("/")
    assert names.named("model.factory", f"{module}:make")() == 3
    assert flags.FLAGS.is_parsed()
