"""Is another answer than the undisturbed one a greedy one, too: by teacher forcing with the `transformers` library.

Batches of other sizes add in another order, so float32 logits differ by about 1e-6, and where two tokens are as likely
as each other, either may be taken. An answer is a near tie if some sequence of tokens makes its text, of as many as it
counts, each with a logit within `LOGIT` of the greatest after those before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

LOGIT = 1e-3


class Teacher:
    """The model in float32. Its libraries take seconds to import: a run on simulated engines does not need them."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch: Any = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.train(False)

    def prompt(self, text: str, *, chat: bool) -> list[int]:
        """The tokens of a prompt; of a chat: of one turn of the user."""
        if not chat:
            return list(self._tokenizer.encode(text))
        turns = [{"role": "user", "content": text}]
        return list(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))

    def count(self, text: str) -> int:
        """The tokens of a text."""
        return len(self._tokenizer.encode(text))

    def is_near_tie(self, prompt: list[int], text: str, tokens: int, *, stopped: bool = False) -> bool:
        """Whether so many tokens with this text are a greedy answer but for near ties.

        Args:
            stopped: a stop string follows the text.
        """
        open_ends: list[list[int]] = [[]]
        while open_ends:
            made = open_ends.pop()
            if len(made) == tokens:
                decoded = self._tokenizer.decode(made, skip_special_tokens=True)
                if decoded == text or (stopped and decoded.startswith(text)):
                    return True
                continue
            with self._torch.inference_mode():
                logits = self._model(self._torch.tensor([prompt + made])).logits[0, -1]
            near = (logits >= logits.max() - LOGIT).nonzero().flatten().tolist()
            open_ends += [[*made, token] for token in near if self._begins([*made, token], text)]
        return False

    def _begins(self, made: list[int], text: str) -> bool:
        """Whether the text and these tokens' begin alike; the last tokens may be parts of a character."""
        decoded = self._tokenizer.decode(made, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
        return text.startswith(decoded) or decoded.startswith(text)
