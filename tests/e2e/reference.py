"""Greedy decoding by the `transformers` library, as the measure of what the stack generates.

Two kernels that add up floats in different orders differ in the last bits, so where two tokens' logits are closer than
`TIE_LOGIT` either is right. Such a tie is counted, and decoding goes on from the token the stack chose.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIE_LOGIT = 1e-3  # logits of the model deviate by about 4; float32 sums over 192 inputs agree to 1e-5


@dataclass(frozen=True)
class Comparison:
    """How far a token sequence agrees. `ties` counts the places where the other of two equal tokens was taken;
    `mismatch` describes the first token that is not greedy, None if there is none."""

    tokens: int
    ties: int
    mismatch: str | None = None


class Reference:
    """The library's own model and tokenizer, float32, on one thread (the stack needs the cores)."""

    def __init__(self, folder: Path, image: bytes | None = None) -> None:
        """`image`: the file of the picture that each prompt has; None: the model reads text alone."""
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

        torch.set_num_threads(1)
        self._torch = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        loader: Any = AutoModelForCausalLM if image is None else AutoModelForImageTextToText
        self.model: Any = loader.from_pretrained(folder, dtype=torch.float32).eval()
        self._image = {} if image is None else pixels(folder, image)
        self.model.generation_config.eos_token_id = None  # it goes on where a text ends, as `ignore_eos` does

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of the conversation through the model's chat template, with the assistant's turn opened."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def embedding(self, prompt: Sequence[int]) -> list[float]:
        """The last hidden state of the last token, as a unit vector."""
        with self._torch.inference_mode():
            states = self.model.model(self._torch.tensor([list(prompt)])).last_hidden_state[0, -1]
            return [float(value) for value in states / states.norm()]

    def probabilities(self, prompt: Sequence[int], head: Any) -> list[float]:
        """Of each class, by a classifier's matrix over the last hidden state of the last token."""
        with self._torch.inference_mode():
            states = self.model.model(self._torch.tensor([list(prompt)])).last_hidden_state[0, -1]
            return [float(one) for one in (self._torch.from_numpy(head) @ states).softmax(-1)]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The library's greedy continuation by `count` tokens."""
        return self._greedy(prompt, count)[0]

    def compare(self, prompt: Sequence[int], produced: Sequence[int]) -> Comparison:
        """Whether `produced`, made with `ignore_eos`, is what greedy decoding of `prompt` gives, up to ties."""
        at = 0
        ties = 0
        while at < len(produced):
            tokens, logits = self._greedy([*prompt, *produced[:at]], len(produced) - at)
            for token, scores in zip(tokens, logits, strict=True):
                wanted = produced[at]
                at += 1
                if token == wanted:
                    continue
                behind = float(scores.max() - scores[wanted])
                if behind > TIE_LOGIT:
                    text = f"token {at - 1}: {wanted} is {behind:.4f} below {token} after {at - 1} equal tokens"
                    return Comparison(at - 1, ties, text)
                ties += 1
                break
        return Comparison(at, ties)

    def logprobs(self, prompt: Sequence[int], produced: Sequence[int]) -> list[float]:
        """Of each produced token, given all before it."""
        ids = self._torch.tensor([[*prompt, *produced]])
        with self._torch.inference_mode():
            scores = self.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return [float(row[token]) for row, token in zip(scores, produced, strict=True)]

    def _greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], Any]:
        """The library's own `generate` of `count` tokens, and the logits behind each."""
        ids = self._torch.tensor([list(prompt)])
        with self._torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                **self._image,
                max_new_tokens=count,
                do_sample=False,
                temperature=None,
                return_dict_in_generate=True,
                output_logits=True,
            )
        return out.sequences[0, len(prompt) :].tolist(), [step[0] for step in out.logits]


def pixels(folder: Path, image: bytes) -> dict[str, Any]:
    """What the model's own image processor makes of a picture."""
    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder)
    made = processor([[Image.open(io.BytesIO(image)).convert("RGB")]], return_tensors="pt")
    return {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}
