"""Trains the built-in model `tiny`: `python -m scripts.tiny --seed 0` writes its tokenizer and weights.

The text is ours: `documents` reads this repository, `topics`, `calls`, `json_answers` and `copies` write dialogues,
`samples` mixes them. `network` and `training` need torch; a seed and a text give the same samples on every machine.
"""
