"""Training data: corpora, tokenizers, batches, and the bigram to beat."""

from acco_jax.data.batches import Batches as Batches
from acco_jax.data.bigram import bigram_bits_per_byte as bigram_bits_per_byte
from acco_jax.data.corpora import StdlibSource as StdlibSource
from acco_jax.data.corpora import TextFolder as TextFolder
from acco_jax.data.pipeline import Corpus as Corpus
from acco_jax.data.pipeline import bits_per_byte as bits_per_byte
from acco_jax.data.pipeline import check_rows as check_rows
from acco_jax.data.pipeline import cuts as cuts
from acco_jax.data.pipeline import held_out_targets as held_out_targets
from acco_jax.data.pipeline import kept_tokenizer as kept_tokenizer
from acco_jax.data.pipeline import load_corpus as load_corpus
from acco_jax.data.pipeline import rows_per_epoch as rows_per_epoch
from acco_jax.data.pipeline import train_iterator as train_iterator
from acco_jax.data.pipeline import validation_batches as validation_batches
from acco_jax.data.tasks import alpaca_prompt as alpaca_prompt
from acco_jax.data.tokenizers import BpeTokenizer as BpeTokenizer
from acco_jax.data.tokenizers import ByteTokenizer as ByteTokenizer
from acco_jax.data.tokenizers import FileTokenizer as FileTokenizer
from acco_jax.data.tokenizers import SentencePieceTokenizer as SentencePieceTokenizer
from acco_jax.data.tokenizers import Tokenizer as Tokenizer
from acco_jax.data.tokenizers import read_tokenizer as read_tokenizer
