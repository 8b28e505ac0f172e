"""The built-in model `tiny`: a small Llama written by our own code, for machines that have no weights to load.

Its text is noise; everything else about it is an ordinary model folder (safetensors, byte-level BPE tokenizer, chat
template with tools), so the whole stack runs on it the way it runs on a real one.

Invariant: the folder is a pure function of the seed and of the recipe (this file, its words and the chat template),
byte for byte, on every machine; and the path `ensure_tiny_model` returns holds all of it, whoever else builds, crashes
or damages files meanwhile.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

VOCAB_SIZE = 2048  # small enough for a 0.4M-parameter embedding, large enough for whole words
HIDDEN_SIZE = 192
LAYERS = 4
HEADS = 8  # divides by 1, 2, 4 and 8: every tensor-parallel size one node has
KV_HEADS = 4  # grouped-query attention, as in the models it stands for
HEAD_SIZE = 32  # the smallest that every vLLM attention backend takes
MLP_SIZE = 512
MAX_POSITIONS = 8192  # long enough for prefix-cache and over-long-prompt tests

CONTROL_TOKENS = PAD, TURN, END = "<|pad|>", "<|turn|>", "<|end|>"
TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")  # vLLM's `hermes` tool parser looks for them in the text
MANIFEST = "manifest.json"
# The roles are the OpenAI ones; a tool's JSON goes into the system turn, one line each.
CHAT_TEMPLATE = resources.files("serve_app.engine") / "chat_template.jinja"

# By name in the model ("{}": the layer): rows, columns and the scale of its numbers, as the exponent of a power of two.
# An odd byte-sized integer times a power of two: exact in float32, float16 and bfloat16 alike, so that changing `dtype`
# changes arithmetic only. Such bytes have a deviation of 147, hence 2**-11 x sqrt(192 inputs) is a gain of about one.
MATRICES: Mapping[str, tuple[int, int, int]] = {
    # half of what a layer adds: text depends on more than the last token
    "model.embed_tokens": (VOCAB_SIZE, HIDDEN_SIZE, -8),
    # doubled: attention picks few positions, averages over many wash the context out
    "model.layers.{}.self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN_SIZE, -10),
    "model.layers.{}.self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN_SIZE, -10),
    "model.layers.{}.self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN_SIZE, -11),
    "model.layers.{}.self_attn.o_proj": (HIDDEN_SIZE, HEADS * HEAD_SIZE, -11),
    "model.layers.{}.mlp.gate_proj": (MLP_SIZE, HIDDEN_SIZE, -11),
    "model.layers.{}.mlp.up_proj": (MLP_SIZE, HIDDEN_SIZE, -11),
    "model.layers.{}.mlp.down_proj": (HIDDEN_SIZE, MLP_SIZE, -11),
    # logits deviate by about 4: top-1 minus top-2 is about one, far above rounding
    "lm_head": (VOCAB_SIZE, HIDDEN_SIZE, -9),
}
NORMS = ("model.layers.{}.input_layernorm", "model.layers.{}.post_attention_layernorm", "model.norm")
LOG2_EOS = -1  # half the logits of the others: greedy text runs to its length, sampling can still stop
LOG2_UNREADABLE = -2  # stray bytes and control tokens: answers stay readable ASCII
LOG2_QUOTE = 1  # a closing quote comes every twenty tokens or so: JSON strings under a schema end

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": MLP_SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,  # a tied head repeats the last token
}
TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": MAX_POSITIONS,
    "bos_token": None,
    "eos_token": END,
    "pad_token": PAD,
    "unk_token": None,
    "clean_up_tokenization_spaces": False,
}

# Common words; the tokenizer is trained on lines made of them.
WORD_LIST = resources.files("serve_app.engine") / "tiny_words.txt"
WORDS = tuple(WORD_LIST.read_text().split())


def default_root() -> Path:
    """`$XDG_CACHE_HOME/serve-app/models`, else `~/.cache/serve-app/models`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "serve-app" / "models"


def ensure_tiny_model(root: Path | None = None, *, seed: int = 0) -> Path:
    """The folder of the built-in model, written first if it is missing or damaged.

    Safe under concurrent callers, threads and processes alike. The first call takes about a second; a repeated one
    reads and hashes 10 MB, which takes milliseconds.

    Args:
        root: folder that holds the models; `default_root()` if None.
        seed: another seed gives other weights under the same tokenizer.

    Raises:
        OSError: the folder cannot be written.
        RuntimeError: what was written does not read back as it was (a failing disk).
    """
    root = default_root() if root is None else root
    # any change to this file, the words or the template makes a new folder: no number to forget
    recipe = b"".join(part.read_bytes() for part in (Path(__file__), WORD_LIST, CHAT_TEMPLATE))
    target = root / f"tiny-{hashlib.sha256(b'%d ' % seed + recipe).hexdigest()[:12]}"
    if _is_intact(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when the process dies
        if _is_intact(target):
            return target
        for stale in root.glob(".building-*"):  # their builder died: it would hold the lock otherwise
            shutil.rmtree(stale)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
        _write(building, seed)
        building.chmod(0o755)  # mkdtemp gives 0700
        if target.exists():
            target.rename(building / "damaged")
        building.rename(target)
        shutil.rmtree(target / "damaged", ignore_errors=True)
    if not _is_intact(target):
        raise RuntimeError(f"{target}: what was written does not read back")
    return target


def _is_intact(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return bool(manifest) and manifest == _manifest(folder, manifest)
    except (OSError, ValueError, TypeError):
        return False


def _manifest(folder: Path, names: Any) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sorted(names)}


def _write(folder: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    tokenizer = _train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(END)
    pad = tokenizer.token_to_id(PAD)
    ids = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad}
    _write_json(folder / "config.json", CONFIG | ids)
    _write_json(folder / "generation_config.json", ids | {"do_sample": True, "temperature": 1.0})
    _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    (folder / CHAT_TEMPLATE.name).write_bytes(CHAT_TEMPLATE.read_bytes())
    save_file(_weights(seed, tokenizer), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / MANIFEST, _manifest(folder, [path.name for path in folder.iterdir()]))
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600; engines may run as another user


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def _lines() -> Iterator[str]:
    """Training text: prose, lists, JSON and code made of `WORDS`, early words more often."""
    count = len(WORDS)
    for i in range(8 * count):
        a, b, c, d = (WORDS[(i * step + i // count) % count] for step in (1, 3, 7, 11))
        common = WORDS[i * i % (40 + i % 80)]
        yield f"{common.capitalize()} {a} {common} {b}s, {c} {b}. {a.capitalize()} {d.capitalize()}?"
        yield f'{{"{a}": "{b} {c}", "{d}": {i % 60}, "{common}": ["{c}", {i % 10}.{i % 7}]}}'
        yield f"def {a}_{b}({c}, {d}={i % 10}):\n    return {c}.{d}[{i % 10}] - {a}\n"


def _train_tokenizer() -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(TOOL_CALL_TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TOOL_CALL_TAGS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the training text gives {tokenizer.get_vocab_size()} tokens, {VOCAB_SIZE} are wanted")
    return tokenizer


def _weights(seed: int, tokenizer: Tokenizer) -> dict[str, NDArray[np.float32]]:
    import numpy as np

    matrices = {name.format(layer): matrix for layer in range(LAYERS) for name, matrix in MATRICES.items()}
    norms = [name.format(layer) for layer in range(LAYERS) for name in NORMS]
    weights = {f"{name}.weight": np.ones(HIDDEN_SIZE, dtype=np.float32) for name in norms}
    for name, (rows, columns, log2_scale) in matrices.items():
        # A hash's own stream, not a library's generator: the same bytes on every machine and version.
        drawn = hashlib.shake_256(f"tiny {seed} {name}.weight".encode()).digest(rows * columns)
        odd = np.frombuffer(drawn, dtype=np.uint8).astype(np.float32) * 2 - 255
        weights[f"{name}.weight"] = odd.reshape(rows, columns) * np.float32(2.0**log2_scale)
    for token, row in enumerate(weights["lm_head.weight"]):
        row *= np.float32(2.0 ** _log2_head_scale(tokenizer.decode([token], skip_special_tokens=False)))
    return weights


def _log2_head_scale(text: str) -> int:
    """The scale of the row of the output head for this token."""
    if text == END:
        return LOG2_EOS
    if text in (*CONTROL_TOKENS, *TOOL_CALL_TAGS) or not (text.isascii() and text.replace("\n", "").isprintable()):
        return LOG2_UNREADABLE
    return LOG2_QUOTE if text == '"' else 0
