"""Checks the one line in which a command refuses."""


def refusal(err: str, *words: str) -> bool:
    """Tells if it is one line with these words in it: field, value and remedy."""
    return (
        err.startswith("error: ")
        and err.count("\n") == 1
        and all(word in err for word in words)
    )
