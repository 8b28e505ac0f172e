"""`python -m scripts.tiny --seed 0`: trains the built-in model on this machine's two cores and writes it."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import torch
import torch.distributed
import torch.multiprocessing
from tokenizers import Tokenizer

from scripts.tiny import documents, model_files, samples, tokens, values
from scripts.tiny.network import Network
from scripts.tiny.samples import Sample, Windows
from scripts.tiny.spans import text_of
from scripts.tiny.training import Progress, loss_of, train
from serve_app.engine.tiny_model import FOLDER, WORDS

ROOT = Path(__file__).resolve().parents[2]
CORES = 2
BATCH_TOKENS = 4096
TOTAL_TOKENS = 9_200_000
RAW_SHARE = 0.2  # of the tokens: documents
TOKENIZER_DIALOGUES = 4000
WORD_REPEATS = 200  # so that each is a token: load generators count on it
NAME_REPEATS = 60
JUDGED_BATCHES = 6  # of another seed, for the loss that the documents state
SAVE_S = 240.0
PRINT_STEPS = 20


def tokenizer_texts(texts: dict[str, str], seed: int) -> Iterator[str]:
    """What the tokenizer learns from: the documents, dialogues and the list of words."""
    yield from texts.values()
    yield from texts.values()
    rng = Random(f"tokenizer {seed}")
    for _ in range(TOKENIZER_DIALOGUES):
        yield text_of(samples.dialogue(rng))
    yield from (f"the {word}" for word in WORDS for _ in range(WORD_REPEATS))
    yield from (f"in {name}" for name in values.LISTS["cities"] for _ in range(NAME_REPEATS))


def judged(windows: Windows, tokenizer: Tokenizer, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Dialogues and windows that no step has seen in this form."""
    drawn = samples.batches(windows, tokenizer, seed=-1 - seed, tokens=BATCH_TOKENS, raw_share=RAW_SHARE)
    rows = [sample for batch in islice(drawn, JUDGED_BATCHES) for sample in batch]
    texts = [row for row in rows if row.is_text]
    return [row for row in rows if not row.is_text], [row.weighed(1.0) for row in texts]


class Reporter:
    """Prints how the training goes, and saves what there is every few minutes."""

    def __init__(self, folder: Path, facts: dict[str, str]) -> None:
        self._folder = folder
        self._facts = facts
        self._saved = time.monotonic()

    def __call__(self, network: Network, progress: Progress) -> None:
        if progress.step % PRINT_STEPS == 0:
            speed = progress.tokens / progress.seconds
            print(
                f"step {progress.step} of {progress.steps}: loss {progress.loss:.3f}, "
                f"{progress.tokens / 1e6:.2f}M tokens, {speed:,.0f} tokens/s, {progress.seconds:.0f} s",
                flush=True,
            )
        if time.monotonic() - self._saved > SAVE_S:
            model_files.save(network, self._folder, self._facts)
            self._saved = time.monotonic()


def work(rank: int, seed: int, total: int, folder: Path, store: Path) -> None:
    """One process of the training."""
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=CORES)
    texts = documents.read(ROOT)
    tokenizer = Tokenizer.from_file(str(folder / model_files.TOKENIZER))
    windows = Windows(texts, tokenizer)
    facts = {"seed": str(seed), "tokens": str(total), "documents": documents.digest(texts)}
    report = Reporter(folder, facts) if rank == 0 else _silent
    drawn = samples.batches(windows, tokenizer, seed=seed, tokens=BATCH_TOKENS, raw_share=RAW_SHARE)
    steps = total // BATCH_TOKENS
    network = train(drawn, seed=seed, steps=steps, report=report, rank=rank, ranks=CORES)
    if rank == 0:
        dialogues, pages = judged(windows, tokenizer, seed)
        before = loss_of(network, dialogues)
        model_files.round_weights(network)
        answers = loss_of(network, dialogues)
        text = loss_of(network, pages)
        model_files.save(network, folder, facts | {"loss_of_answers": f"{answers:.4f}", "loss_of_text": f"{text:.4f}"})
        print(f"loss of answers {answers:.4f} ({before:.4f} before rounding), of documents {text:.4f}", flush=True)
    torch.distributed.destroy_process_group()


def _silent(network: Network, progress: Progress) -> None:
    """Nothing: the first process reports."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.tiny", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=TOTAL_TOKENS, help="how many tokens are read")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the model folder; default: the package's own")
    options = parser.parse_args()
    model_files.prepare(options.out, tokens.train(tokenizer_texts(documents.read(ROOT), options.seed)))
    with tempfile.TemporaryDirectory() as store:
        given = (options.seed, options.tokens, options.out, Path(store) / "store")
        torch.multiprocessing.spawn(work, given, nprocs=CORES)  # type: ignore[attr-defined,no-untyped-call]
