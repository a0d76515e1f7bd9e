"""Add to the site files from elsewhere: results, the architecture, the notebooks."""

import base64
import json
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
SOURCE = "https://github.com/acco-jax/acco-jax/blob/main"


def on_files(files, config):
    found = {f"results/{file.name}": file for file in RESULTS.iterdir()}
    found["architecture.md"] = ROOT / "docs" / "architecture.md"
    for uri, file in found.items():
        files.append(File.generated(config, uri, abs_src_path=str(file)))
    for notebook in sorted((ROOT / "colab").glob("*.ipynb")):
        for uri, content in pages_of(notebook):
            files.append(File.generated(config, uri, content=content))
    return files


def on_env(env, config, **_):
    """Names of jax and optax in signatures become links to their documentation."""
    for name, address in config.extra["addresses"].items():
        config.plugins["autorefs"].register_url(name, address)
    return env


def pages_of(notebook):
    """Yield a notebook as Markdown, with outputs, and each of its pictures as PNG."""
    parts, pictures = [], 0
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{notebook.stem}_{pictures}.png"
                yield f"notebooks/{name}", base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({name})")
                pictures += 1
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    yield f"notebooks/{notebook.stem}.md", "\n\n".join(parts) + "\n"


def on_page_markdown(markdown, page, **_):
    """Links between files of the repository become links between pages."""
    up = "../" * page.file.src_uri.count("/")
    links = {
        r"\]\((?:\.\./)+experiments/results/": f"]({up}results/",
        r"\]\((?:\.\./)+architecture\.md": f"]({up}architecture.md",
        r"\]\((?:\.\./)+docs/site/": f"]({up}",
        r"\]\((?:\.\./)+colab/(\w+)\.ipynb": rf"]({up}notebooks/\1.md",
        r"\]\((?:\.\./)+(experiments/\w+/\w+\.py)\)": rf"]({SOURCE}/\1)",
    }
    for link, there in links.items():
        markdown = re.sub(link, there, markdown)
    return markdown
