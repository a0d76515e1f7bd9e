"""Add to the site what lies elsewhere in the repository: results, the architecture."""

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
    return files


def on_page_markdown(markdown, page, **_):
    """Links between files of the repository become links between pages."""
    up = "../" * page.file.src_uri.count("/")
    links = {
        r"\]\((?:\.\./)+experiments/results/": f"]({up}results/",
        r"\]\((?:\.\./)+architecture\.md": f"]({up}architecture.md",
        r"\]\((?:\.\./)+docs/site/": f"]({up}",
        r"\]\((?:\.\./)+(experiments/\w+/\w+\.py)\)": rf"]({SOURCE}/\1)",
    }
    for link, there in links.items():
        markdown = re.sub(link, there, markdown)
    return markdown
