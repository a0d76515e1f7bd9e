"""Tokenizers: round trips, vocabularies, files."""

import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from acco_jax.data import BpeTokenizer, ByteTokenizer, read_tokenizer

TEXTS = [f"the cat {i} sat on the mat, l'été, 猫\n<|endoftext|>" for i in range(200)]
TOKENIZERS = [ByteTokenizer(), BpeTokenizer.train(TEXTS, 300)]
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
each = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe"])


@each
@given(texts=st.lists(text | st.sampled_from(TEXTS), max_size=4))
def test_round_trip(tokenizer, texts):
    encoded = tokenizer.encode_batch(texts)
    for one, ids in zip(texts, encoded, strict=True):
        assert ids.dtype == np.int32
        assert ids.ndim == 1
        assert np.all((ids >= 0) & (ids < tokenizer.end_of_text))
        np.testing.assert_array_equal(ids, tokenizer.encode(one))
        assert tokenizer.decode(ids) == one
        assert tokenizer.decode([*ids, tokenizer.end_of_text]) == one
        assert len(ids) <= len(one.encode())


@each
def test_end_of_text_is_the_last_id(tokenizer):
    assert tokenizer.end_of_text == tokenizer.vocab_size - 1


def test_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode("é\n").tolist() == [0xC3, 0xA9, 10]
    assert tokenizer.decode(np.uint16([0xC3, 65])) == "\ufffdA"


def test_bpe_compresses_what_it_was_trained_on():
    assert len(TOKENIZERS[1].encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2


def test_bpe_training_is_deterministic_and_survives_a_file(tmp_path):
    again = BpeTokenizer.train(iter(TEXTS), 300)
    assert again.fingerprint == TOKENIZERS[1].fingerprint
    assert BpeTokenizer.train(TEXTS, 290).fingerprint != again.fingerprint
    again.save(tmp_path / "new folder" / "tokenizer.json")
    loaded = BpeTokenizer.load(tmp_path / "new folder" / "tokenizer.json")
    assert loaded.fingerprint == again.fingerprint
    assert loaded.vocab_size == again.vocab_size == 300
    np.testing.assert_array_equal(loaded.encode(TEXTS[3]), again.encode(TEXTS[3]))
    assert [p.name for p in (tmp_path / "new folder").iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize(("vocab_size", "hint"), [(256, "257"), (5000, "lower it")])
def test_impossible_vocabularies_are_refused(vocab_size, hint):
    with pytest.raises(ValueError, match=hint) as raised:
        BpeTokenizer.train(TEXTS, vocab_size)
    assert str(vocab_size) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_special_tokens_that_no_text_has_are_not_ids_of_texts(tmp_path):
    bpe = tokenizers.Tokenizer.from_str(TOKENIZERS[1]._bpe.to_str())
    size = bpe.get_vocab_size()
    found = []
    for token, special in ("</s>", True), ("<image>", True), ("<tool>", False):
        bpe.add_tokens([tokenizers.AddedToken(token, special=special)])
        bpe.save(str(tmp_path / "tokenizer.json"))
        tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
        found.append((tokenizer.vocab_size - size, tokenizer.text_vocab_size - size))
    assert found == [(1, 1), (2, 1), (3, 3)]
    assert tokenizer.encode("a<tool><image>").max() == tokenizer.vocab_size - 1


@pytest.fixture
def pieces(tmp_path):
    """A SentencePiece model, whose "<s>" is 1 and "</s>" 2."""
    with open(tmp_path / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=file, vocab_size=50,
            minloglevel=2,
        )  # fmt: skip
    return tmp_path / "tokenizer.model"


@pytest.mark.parametrize(
    ("said", "prefix"), [(True, (1,)), (False, ()), (None, ()), ("yes", ())]
)
def test_pieces_begin_as_the_configuration_says(pieces, tmp_path, said, prefix):
    plain = read_tokenizer(pieces)
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": said}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_tokenizer(pieces)
    assert (plain.prefix, found.prefix) == ((), prefix)
    assert found.fingerprint == plain.fingerprint
    assert found.encode("the cat").tolist() == plain.encode("the cat").tolist()
    found.export(tmp_path / "out", 64, {})
    exported = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert exported["add_bos_token"] is bool(prefix)


def test_pieces_of_changed_texts_are_exported_with_a_warning(pieces, tmp_path, caplog):
    """Its trainer's default makes one space of several; LlamaTokenizer does not."""
    read_tokenizer(pieces).export(tmp_path / "out", 64, {})
    assert "which transformers' LlamaTokenizer does not" in caplog.text
    caplog.clear()
    with open(pieces, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=file, vocab_size=50,
            minloglevel=2, normalization_rule_name="identity",
            remove_extra_whitespaces=False,
        )  # fmt: skip
    read_tokenizer(pieces).export(tmp_path / "other", 64, {})
    assert not caplog.text


def test_ids_beyond_the_pieces_are_left_out(pieces):
    tokenizer = read_tokenizer(pieces)
    ids = tokenizer.encode("the cat sat").tolist()
    more = [tokenizer.vocab_size, *ids[:2], 99, *ids[2:], tokenizer.end_of_text]
    assert tokenizer.decode(np.array(more)) == tokenizer.decode(ids) == "the cat sat"
