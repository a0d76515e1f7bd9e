"""Prose of README.md and the site: short sentences, one word for one idea."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
PAGES = [ROOT / "README.md", *sorted(SITE.rglob("*.md"))]
MEAN, MOST = 18, 25  # words of a sentence: on average and at most

# Words that have a better one (the glossary, docs/site/glossary.md), outside of code.
# `--require-hidden`, `assert_hidden` and quoted output are code.
WORDS = (
    r"to the bit", r"bit for bit", r"hid(?:den|e|ing)", r"pending gradients?",
    r"few(?:er)? bits", r"Psi", r"anew", r"but for", r"master cop(?:y|ies)", r"primes?",
    r"priming", r"machines? that (?:is|are) not here", r"the wire", r"refused?s?",
    r"split form", r"fused form", r"trips", r"waited for",
)  # fmt: skip


def name(page: Path) -> str:
    return str(page.relative_to(SITE if SITE in page.parents else ROOT))


def prose(text: str) -> str:
    """Markdown without code blocks, tables, headings, pictures and addresses."""
    text = re.sub(r"^```.*?^```$|<picture>.*?</picture>", "", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"\n\n(?:    .*\n|      +.*\n|\n)+", "\n\n", text)  # indented code
    text = re.sub(r"^(?:\||#|:::).*$", "\n", text, flags=re.M)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]+`", "`code`", text)


def sentences(text: str) -> list[str]:
    """Sentences of three words or more; a list's item and a paragraph end one."""
    parts = re.split(
        r"[.?!][*)]*(?:\s|$)|\n\n|^ *(?:-|\d+\.) ", prose(text), flags=re.M
    )
    return [x for x in (" ".join(part.split()) for part in parts) if x.count(" ") > 1]


def lengths(page: Path) -> list[int]:
    return [len(x.split()) for x in sentences(page.read_text())]


def mean(page: Path) -> float:
    found = lengths(page)
    return sum(found) / max(len(found), 1)


def test_sentences_are_found():
    text = "# A title\n\nOne two three. It is `a b`, so:\n\n    code\n"
    text += "\n- [An item](x.md) ends\n"
    assert sentences(text) == ["One two three", "It is `code`, so:", "An item ends"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_sentences_are_short(page):
    assert mean(page) <= MEAN
    assert [x for x in sentences(page.read_text()) if len(x.split()) > MOST] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_words_are_the_glossarys(page):
    found = re.findall(rf"\b(?:{'|'.join(WORDS)})\b", prose(page.read_text()), re.I)
    assert found == []


def test_tutorials_are_short():
    tutorials = [page for page in PAGES if page.parent.name == "tutorials"]
    assert len(tutorials) == 4
    assert max(len(page.read_text().split()) for page in tutorials) <= 500


if __name__ == "__main__":
    for page in PAGES:
        found = lengths(page)
        print(f"{name(page):28} {mean(page):5.1f} {max(found, default=0):4}")
