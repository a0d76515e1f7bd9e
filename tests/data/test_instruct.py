"""Instructions: what is learnt of them, how they are padded, cut and weighed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from acco_jax import data
from acco_jax.data import cache
from acco_jax.data.rows import Examples

END = 256
ANSWERS = ["a", "bb" * 4, "ccc" * 9, "d" * 40]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Some 40 instructions whose answers are of very different lengths."""
    folder = tmp_path_factory.mktemp("instruct")
    tokenizer, draw = data.ByteTokenizer(), np.random.default_rng(0)
    examples = [
        ("?" * int(draw.integers(1, 6)) + str(i), ANSWERS[draw.integers(4)])
        for i in range(40)
    ]
    with open(folder / "tokens", "wb") as file:
        count, size, spans = cache._pack(examples, tokenizer, np.dtype("u2"), file)
    tokens = np.fromfile(folder / "tokens", "u2")
    assert count == 40 and size == sum(len(answer) for _, answer in examples)
    return data.Corpus(
        tokenizer, tokens, tokens, size, size, 40, 40, 0,
        np.concatenate(spans), np.concatenate(spans),
    )  # fmt: skip


def iterate(corpus, batch_size=4, length=60, **options):
    return data.train_iterator(
        corpus, length=length, batch_size=batch_size, seed=0, **options
    )


def test_spans(corpus):
    decode = corpus.tokenizer.decode
    for first, answer, end in corpus.train_spans:
        assert corpus.train_tokens[end] == corpus.train_tokens[first - 1] == END
        assert decode(corpus.train_tokens[first:answer]).startswith("?")
        assert decode(corpus.train_tokens[answer:end]) in ANSWERS


def test_every_answer_and_its_end_is_learnt_once(corpus):
    batches = data.validation_batches(corpus, length=60, batch_size=16)
    total, learnt = 0, []
    for batch in batches:
        assert batch["tokens"].shape == (16, 61)
        total += batch["mask"].sum()
        for tokens, mask in zip(batch["tokens"], batch["mask"], strict=True):
            targets = tokens[1:][mask == 1]
            assert not len(targets) or targets[-1] == END
            learnt.append(corpus.tokenizer.decode(targets))
    assert sum(map(len, learnt)) == corpus.validation_bytes
    assert total == corpus.validation_bytes + 40
    whole = data.bits_per_byte(1.0, corpus)
    assert data.bits_per_byte(1.0, corpus, targets=total) == whole


def test_a_batch_is_as_long_as_its_longest_row(corpus):
    lengths = (16, 36, 60)
    seen = set()
    for processes in (1, 2, 4):
        parts = [
            iterate(corpus, workers=processes, own=(p,), lengths=lengths)
            for p in range(processes)
        ]
        for _ in range(20):
            found = [next(part) for part in parts]
            width = {batch["mask"].shape[1] for batch in found}
            assert len(width) == 1
            used = np.concatenate([batch["mask"] for batch in found]).any(0)
            longest = int(np.flatnonzero(used).max()) + 1
            assert width == {min(n for n in lengths if n >= longest)}
            seen |= width
        shapes = [batch["tokens"].shape[1] for batch in parts[0].shapes()]
        assert shapes == [17, 37, 61]
    assert len(seen) > 1


def test_long_answers_are_cut_and_long_prompts_left_out(corpus):
    prompts = corpus.train_spans[:, 1] - corpus.train_spans[:, 0]
    sizes = corpus.train_spans[:, 2] - corpus.train_spans[:, 0] + 1
    length = 6
    kept = int((prompts < length).sum())
    iterator = iterate(corpus, batch_size=1, length=length)
    assert 0 < kept < 40
    short = [next(iterator) for _ in range(kept)]
    assert all(batch["mask"].sum() for batch in short)
    assert iterator.targets == sum(batch["mask"].sum() for batch in short)
    ends = sum(
        batch["tokens"][0, 1:][batch["mask"][0] == 1][-1] == END for batch in short
    )
    cut = int(((prompts < length) & (sizes > length)).sum())
    assert ends == kept - cut
    assert data.cuts(corpus, 60) == []
    assert data.cuts(corpus, length)[:1] == [
        f"{cut} of 40 examples of the train split are cut to 6 tokens; {40 - kept} "
        "more are left out: only their prompt is as long"
    ]


@pytest.mark.parametrize("lengths", [(), (1,)])
def test_instructions_that_do_not_fit_need_a_longer_row(corpus, lengths):
    field = r"data\.lengths \(and length\)" if lengths else "length"
    length = 60 if lengths else 1
    with pytest.raises(
        ValueError, match=f"0 examples .* in 1 tokens.*: raise {field} "
    ):
        iterate(corpus, length=length, lengths=lengths)
    with pytest.raises(ValueError, match=f"answer in 1 tokens: raise {field}, or hold"):
        data.validation_batches(
            corpus, length=length, batch_size=4,
            lengths=lengths,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"40 examples .*: lower microbatch_size, "):
        iterate(corpus, batch_size=41)
    with pytest.raises(ValueError, match=r"none of the 40 examples: set data\.skew"):
        iterate(corpus, batch_size=50, workers=50, skew=1.0)


def test_a_skew_groups_instructions(corpus):
    iterator = iterate(corpus, batch_size=2, workers=2, skew=1.0)
    means = [[], []]
    for _ in range(30):
        for worker, row in enumerate(next(iterator)["tokens"]):
            means[worker].append(row[row != END].mean())
    assert max(means[0]) <= min(means[1])


def test_the_bigram_is_counted_on_answers(corpus):
    """Answers of a letter each, then the end: a bigram learns nearly all of them."""
    plain = dataclasses.replace(corpus, train_spans=None, validation_spans=None)
    assert data.bigram_bits_per_byte(corpus) < data.bigram_bits_per_byte(plain)


@pytest.mark.parametrize("workers", [2, 4])
def test_uneven_answers_are_weighed_by_their_tokens(corpus, workers):
    """One step of sgd on a table of logits, against a loop over all targets."""
    devices, vocabulary = jax.devices()[:workers], 260
    mesh = jax.make_mesh((workers,), ("data",), devices=devices)
    lengths = (16, 32, 60)
    counts = (1, 2) if workers == 2 else None  # the first worker computes less
    iterator = iterate(
        corpus, 8, workers=workers, microbatches=2, lengths=lengths, counts=counts
    )

    def loss_fn(params, batch, rng):
        logits = params["table"][batch["tokens"][:, :-1]]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["tokens"][:, 1:]
        )
        return (losses * batch["mask"]).sum(), batch["mask"].sum(), {}

    draw = np.random.default_rng(1).normal(size=(vocabulary, vocabulary))
    tx = acco_jax.zero1(optax.sgd(1.0), mesh=mesh)
    params = {"table": jnp.asarray(draw, jnp.float32)}
    params, state = acco_jax.start(tx, params)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=2)
    table = draw.copy()
    for _ in range(2):
        before = iterator.targets
        batch = next(iterator)
        gradient, nats, targets = np.zeros_like(table), 0.0, 0
        for tokens, mask in zip(batch["tokens"], batch["mask"], strict=True):
            for x, y in zip(tokens[:-1][mask == 1], tokens[1:][mask == 1], strict=True):
                shifted = np.exp(table[x] - table[x].max())
                p = shifted / shifted.sum()
                gradient[x] += p
                gradient[x, y] -= 1
                nats, targets = nats - np.log(p[y]), targets + 1
        table -= gradient / targets
        params, state, metrics = step(params, state, batch, counts and np.array(counts))
        assert metrics["weight"] == targets == iterator.targets - before
        assert float(metrics["loss"]) == pytest.approx(nats / targets, rel=1e-5)
        found = acco_jax.committed_params(state, params)["table"]
        np.testing.assert_allclose(found, table, rtol=1e-5, atol=2e-6)


def test_examples_of_one_token():
    tokens = np.array([END, 5, END, 6, 7, END], np.uint16)
    spans = np.array([[1, 2, 2], [3, 4, 5]])  # an empty answer, and one of a token
    batch = Examples(tokens, spans, (2, 4), END).read(np.array([1, 0, -1]), 4)
    assert batch["tokens"].tolist() == [
        [END, 6, 7, END, END],
        [END, 5, END, END, END],
        [END] * 5,
    ]
    assert batch["mask"].tolist() == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
