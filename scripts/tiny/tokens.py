"""The tokenizer: byte-level BPE whose words of this product are single tokens.

Small letters take the space before them along; capitals and digits stand alone. So a name, a number or an identifier
in a question has the same tokens as in the JSON that repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from serve_app.engine.tiny_model import CONTROL_TOKENS, TOOL_CALL_TAGS, VOCAB_SIZE

PIECES = r" ?[a-z]+|[A-Z]+[a-z]*|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s"


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly `VOCAB_SIZE` tokens.

    Raises:
        RuntimeError: the texts give fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(TOOL_CALL_TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TOOL_CALL_TAGS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the training text gives {tokenizer.get_vocab_size()} tokens, {VOCAB_SIZE} are wanted")
    return tokenizer
