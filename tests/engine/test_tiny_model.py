"""The built-in model: the same bytes everywhere, whole whoever interferes, and fit to test a serving stack with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine import tiny_model
from serve_app.engine.tiny_model import MANIFEST, VOCAB_SIZE, WORDS, ensure_tiny_model

# Of seed 0. Changed the recipe on purpose? Then take the new ones from the folder's manifest.
WEIGHTS_SHA256 = "91e4bc30ae5d645de3ddd507a2becdd63c24e52101a54ea227e90e3696db8818"
TOKENIZER_SHA256 = "c571d202d9a6eddeaf21b83fb28d29e3bf6f1994b97838a7c9724494e3dfbfb8"

TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # on a busy machine more threads wait for each other
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_weights_and_tokenizer_are_the_same_bytes_on_every_machine(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["model.safetensors"] == WEIGHTS_SHA256
    assert manifest["tokenizer.json"] == TOKENIZER_SHA256


def test_another_seed_changes_the_weights_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    other = ensure_tiny_model(tmp_path, seed=1)
    assert other.name != folder.name
    first = bytes_of(folder)
    second = bytes_of(other)
    changed = {name for name in first | second if first.get(name) != second.get(name)}
    assert changed == {"model.safetensors", MANIFEST}


def test_default_root_follows_the_cache_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tiny_model.default_root() == tmp_path / "cache/serve-app/models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tiny_model.default_root() == tmp_path / "home/.cache/serve-app/models"


def test_importing_the_module_loads_no_heavy_library() -> None:
    code = (
        "import sys, serve_app.engine.tiny_model\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'numpy', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_building_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from serve_app.engine.tiny_model import ensure_tiny_model\n"
        f"ensure_tiny_model(pathlib.Path({str(tmp_path)!r}))\n"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


class CountedWrite:
    """`_write` with a counter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self._write = tiny_model._write
        monkeypatch.setattr(tiny_model, "_write", self)

    def __call__(self, folder: Path, seed: int) -> None:
        self.calls += 1
        self._write(folder, seed)


def test_threads_that_ask_at_once_share_one_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = CountedWrite(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: ensure_tiny_model(tmp_path), range(8)))
    assert write.calls == 1
    assert len(paths) == 1
    ensure_tiny_model(tmp_path)
    assert write.calls == 1


def test_processes_that_ask_at_once_get_one_whole_folder(tmp_path: Path, folder: Path) -> None:
    code = (
        "import pathlib; from serve_app.engine.tiny_model import ensure_tiny_model\n"
        f"print(ensure_tiny_model(pathlib.Path({str(tmp_path)!r})).stat().st_ino)"
    )
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    inodes = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0] * 4
    assert inodes == {str((tmp_path / folder.name).stat().st_ino)}  # nobody replaced what another returned
    assert bytes_of(tmp_path / folder.name) == bytes_of(folder)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", folder.name}


def _truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def _flip_a_byte(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(5_000_000)
        byte = file.read(1)[0]
        file.seek(5_000_000)
        file.write(bytes([byte ^ 1]))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated weights": _truncate,
    "one byte of the weights": _flip_a_byte,
    "a file gone": lambda folder: (folder / "tokenizer.json").unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "a manifest that is not JSON": lambda folder: (folder / MANIFEST).write_text("{"),
    "an empty manifest": lambda folder: (folder / MANIFEST).write_text("{}"),
    "a manifest of another shape": lambda folder: (folder / MANIFEST).write_text("3"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_made_again(tmp_path: Path, folder: Path, damage: str) -> None:
    made = ensure_tiny_model(tmp_path)
    DAMAGE[damage](made)
    assert bytes_of(made) != bytes_of(folder)
    assert ensure_tiny_model(tmp_path) == made
    assert bytes_of(made) == bytes_of(folder)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", made.name}


def test_a_build_that_dies_leaves_no_model_behind(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(building: Path, seed: int) -> None:
        (building / "config.json").write_text("{")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(tiny_model, "_write", dies)
        with pytest.raises(OSError, match="disk full"):
            ensure_tiny_model(tmp_path)
    assert not (tmp_path / folder.name).exists()
    assert bytes_of(ensure_tiny_model(tmp_path)) == bytes_of(folder)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", folder.name}


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < VOCAB_SIZE for token in ids)


def test_tokenizer_knows_words_and_ends_with_the_models_eos(tokenizer: Any, folder: Path) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    assert len(tokenizer.encode("the weather in the city")) == 5
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|end|>") == eos == tokenizer.eos_token_id


def conversation(arguments: object) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": CALL | {"arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21 C"},
        {"role": "assistant", "content": "It is 21 C."},
    ]


@pytest.mark.parametrize("arguments", [CALL["arguments"], json.dumps(CALL["arguments"])], ids=["object", "string"])
def test_chat_template_renders_every_role_and_tools(tokenizer: Any, arguments: object) -> None:
    text = tokenizer.apply_chat_template(
        conversation(arguments),
        tools=[{"type": "function", "function": TOOL}],
        tokenize=False,
        add_generation_prompt=True,
    )
    called = f"<tool_call>{json.dumps(CALL)}</tool_call>"
    assert text == (
        f"<|turn|>system\nBe brief.\n\nFunctions:\n{json.dumps(TOOL)}\n"
        'Call one with <tool_call>{"name": "...", "arguments": {}}</tool_call><|end|>\n'
        "<|turn|>user\nWeather in Paris?<|end|>\n"
        f"<|turn|>assistant\n{called}\n{called}<|end|>\n"
        "<|turn|>tool\n21 C<|end|>\n"
        "<|turn|>assistant\nIt is 21 C.<|end|>\n"
        "<|turn|>assistant\n"
    )


def test_chat_template_needs_neither_system_turn_nor_tools(tokenizer: Any) -> None:
    user = {"role": "user", "content": "Hi"}
    assert tokenizer.apply_chat_template([user], tokenize=False) == "<|turn|>user\nHi<|end|>\n"
    developer = tokenizer.apply_chat_template([{"role": "developer", "content": "D"}, user], tokenize=False)
    assert developer == "<|turn|>system\nD<|end|>\n<|turn|>user\nHi<|end|>\n"
    with pytest.raises(Exception, match="unknown role: bogus"):
        tokenizer.apply_chat_template([{"role": "bogus", "content": "x"}], tokenize=False)


def test_turn_marks_are_single_tokens(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=False)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|turn|>")) == 1
    assert ids.count(tokenizer.eos_token_id) == 1
    # The tags stay in decoded text where special tokens are dropped, else no parser could see them.
    tags = tokenizer.encode("<tool_call></tool_call>")
    assert len(tags) == 2
    assert tokenizer.decode(tags, skip_special_tokens=True) == "<tool_call></tool_call>"


def test_every_dtype_holds_the_same_weights(model: Any) -> None:
    import torch

    for name, weight in model.named_parameters():
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(weight.to(dtype).float(), weight), (name, dtype)
    assert 2_000_000 < sum(weight.numel() for weight in model.parameters()) < 3_000_000


@pytest.fixture(scope="module")
def greedy(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Tokens [20 prompts, 64] and logits [20, 64, vocabulary] of greedy decoding, end-of-text not obeyed."""
    import torch

    chats = [
        [{"role": "user", "content": f"Tell me about the {WORDS[3 * i]} and the {WORDS[-i - 1]}."}] for i in range(20)
    ]
    inputs = tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
    )
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=VOCAB_SIZE,  # no such token: runs to its length
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, dim=1)


def test_greedy_choices_stand_far_above_rounding(greedy: tuple[Any, Any]) -> None:
    top = greedy[1].topk(2, dim=-1).values
    gaps = top[..., 0] - top[..., 1]
    assert gaps.median() > 0.3
    assert (gaps < 1e-3).float().mean() < 0.01


def test_greedy_text_varies_and_runs_on(greedy: tuple[Any, Any], tokenizer: Any) -> None:
    tokens = greedy[0].tolist()
    assert all(len(set(row)) > 40 for row in tokens)
    assert len({tuple(row) for row in tokens}) == len(tokens)
    assert not any(tokenizer.eos_token_id in row for row in tokens)
    text = "".join(tokenizer.batch_decode(greedy[0]))
    assert sum(c.isascii() and (c.isprintable() or c == "\n") for c in text) / len(text) > 0.99


def test_end_of_text_is_rare_but_possible(greedy: tuple[Any, Any], tokenizer: Any) -> None:
    chance = greedy[1].softmax(dim=-1)[..., tokenizer.eos_token_id].mean().item()
    assert 1e-8 < chance < 1e-4
