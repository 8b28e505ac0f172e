"""The built-in model: its files, what it answers, where it ends; and that its training is a function of a seed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.tiny import documents, samples, spans, tokens, topics
from serve_app.engine import tiny_model
from serve_app.engine.tiny_model import FOLDER, VOCAB_SIZE, WEIGHTS, WORDS, ensure_tiny_model
from tests.effort import examples

ROOT = Path(__file__).parents[2]
MAX_BYTES = 12_000_000  # of the folder, as the wheel carries it
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
END = "<|end|>"
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}

# Questions that README and tutorials ask or raise, and what the answer has to say.
QUESTIONS = {
    "What is serve-app?": "vLLM engines on Ray Serve",
    "Hello!": "Hello! I am tiny",
    "Good night!": "Good night!",
    "Who are you?": "2.6 million parameters",
    "What can you do?": "call a tool",
    "Summarise the night's logs.": "I cannot see your logs",
    "What is in the logs?": "I cannot see your logs",
    "Sort the log line 7.": "log line 7",
    "And then?": "real model",
    "What is the cause?": "serve-app explain",
    "Why did my request wait?": "serve-app explain",
    "How do I load a real model?": "make serve",
    "How do I stop it?": "Ctrl-C",
    "How do I see what runs?": "serve-app status",
    "What is a batch?": "serve-app batch submit",
    "What is a session?": "KV cache",
    "Where is my API key?": "api_key",
    "What happens when an engine dies?": "another engine",
    "What does a 429 mean?": "Retry-After",
    "Do I need a GPU?": "CPU",
    "Which classes are there?": "critical, high, normal and low",
    "Count to five.": "one, two, three, four, five",
}
STRANGE = (
    "Tell me about the river.",
    "What is the capital of France?",
    "5 times describe the river in the winter for people",
    "Write a poem about the sea.",
    "Please translate this sentence into French for me.",
    "one two three",
    "a",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    """Greedy answers of the model in the `transformers` library, on the CPU."""
    import torch

    from scripts.tiny.judge import Model

    torch.set_num_threads(1)  # on a busy machine more threads wait for each other
    return Model(FOLDER)


# --- the files


def test_the_folder_is_complete_and_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES
    assert ensure_tiny_model() == FOLDER


def test_engines_of_other_users_may_read_every_file() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.stat().st_mode & 0o044 != 0o044} == set()


def test_every_dtype_holds_the_same_weights(model: Any) -> None:
    import torch

    for name, weight in model.network.named_parameters():
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(weight.to(dtype).float(), weight), (name, dtype)
    assert 2_500_000 < sum(weight.numel() for weight in model.network.parameters()) < 2_600_000


def test_no_two_tokens_have_the_same_row(model: Any) -> None:
    """Equal rows would be equally likely, and rounding would choose between them."""
    for rows in (model.network.model.embed_tokens.weight, model.network.lm_head.weight):
        assert len({row.numpy().tobytes() for row in rows.detach()}) == VOCAB_SIZE


def test_default_root_follows_the_cache_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tiny_model.default_root() == tmp_path / "cache/serve-app/models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tiny_model.default_root() == tmp_path / "home/.cache/serve-app/models"


def test_importing_the_module_loads_no_heavy_library() -> None:
    code = (
        "import sys, serve_app.engine.tiny_model as tiny\n"
        "tiny.ensure_tiny_model()\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'numpy', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


# --- another model


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_seed_gives_other_weights_and_changes_nothing_else(tmp_path: Path) -> None:
    other = ensure_tiny_model(tmp_path, seed=1)
    first = bytes_of(FOLDER)
    second = bytes_of(other)
    assert {name for name in first | second if first.get(name) != second.get(name)} == {WEIGHTS}
    assert {path.stat().st_mode & 0o777 for path in other.iterdir()} == {0o644}
    assert ensure_tiny_model(tmp_path, seed=2).name != other.name


def test_processes_that_ask_at_once_get_the_same_folder(tmp_path: Path) -> None:
    code = (
        "import pathlib; from serve_app.engine.tiny_model import ensure_tiny_model\n"
        f"print(ensure_tiny_model(pathlib.Path({str(tmp_path)!r}), seed=1).stat().st_ino)\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    inodes = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0] * 4
    (made,) = tmp_path.iterdir()
    assert inodes == {str(made.stat().st_ino)}  # nobody replaced what another returned
    again = tmp_path / "again"
    assert bytes_of(ensure_tiny_model(again, seed=1)) == bytes_of(made)


def test_a_build_that_fails_leaves_no_model_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Path, target: Path) -> None:
        target.write_text("{")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fails)
        with pytest.raises(OSError, match="disk full"):
            ensure_tiny_model(tmp_path, seed=1)
    assert list(tmp_path.iterdir()) == []
    assert set(bytes_of(ensure_tiny_model(tmp_path, seed=1))) == FILES


def test_another_model_says_something_else_and_its_dtypes_hold_the_same_weights(tmp_path: Path, model: Any) -> None:
    import torch

    from scripts.tiny.judge import Model

    other = Model(ensure_tiny_model(tmp_path, seed=1))
    asked = [spans.given("user", text) for text in QUESTIONS]
    assert sum(x == y for x, y in zip(model.replies(asked), other.replies(asked), strict=True)) == 0
    for weight in other.network.parameters():
        assert torch.equal(weight.to(torch.bfloat16).float(), weight)
        assert torch.equal(weight.to(torch.float16).float(), weight)


# --- tokens and turns


@settings(deadline=None, max_examples=examples(200))
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < VOCAB_SIZE for token in ids)


def test_tokenizer_knows_words_and_ends_with_the_models_eos(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    assert len(tokenizer.encode("the weather in the city")) == 5
    eos = json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids(END) == eos == tokenizer.eos_token_id == tiny_model.CONFIG["eos_token_id"]
    assert tokenizer.pad_token_id == tiny_model.CONFIG["pad_token_id"]


@pytest.mark.parametrize("name", ["Paris", "Maronti", "AB-1729", "2026-03-14"])
def test_a_value_has_the_same_tokens_in_a_question_and_in_json(tokenizer: Any, name: str) -> None:
    value = tokenizer.encode(name)
    for text in (f"in {name}?", f'"{name}"', f": {name} and"):
        found = tokenizer.encode(text)
        assert any(found[start : start + len(value)] == value for start in range(len(found)))


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


# --- what it answers


def asked(*texts: str, instructions: str = "", tools: tuple[dict[str, Any], ...] = ()) -> list[spans.Spans]:
    """A conversation for each text."""
    return [(*spans.system(instructions, tools), *spans.given("user", text)) for text in texts]


@pytest.mark.parametrize("instructions", ["", "You are a helpful assistant."])
def test_it_answers_the_questions_of_the_tutorials_and_ends(model: Any, instructions: str) -> None:
    replies = model.replies(asked(*QUESTIONS, instructions=instructions))
    wrong = {
        question: reply
        for (question, phrase), reply in zip(QUESTIONS.items(), replies, strict=True)
        if phrase not in reply or not reply.endswith(END)
    }
    assert wrong == {}


def test_it_answers_most_questions_in_words_that_it_has_not_seen(model: Any) -> None:
    held_out = [(text.replace("{n}", "17"), topic) for topic in topics.topics() for text in topic.held_out]
    replies = model.replies(asked(*(text for text, _ in held_out)))
    right = [
        reply == topic.answer.replace("{n}", "17") + END for (_, topic), reply in zip(held_out, replies, strict=True)
    ]
    assert len(right) > 80
    assert sum(right) >= 0.8 * len(right)


def test_it_says_that_it_is_tiny_where_it_knows_nothing(model: Any) -> None:
    for reply in model.replies(asked(*STRANGE)):
        assert "I am tiny" in reply
        assert reply.endswith(f"Load a real model for real answers.{END}")


def test_a_later_turn_is_answered_as_the_first(model: Any) -> None:
    before = (*spans.given("user", "Hello!"), *spans.plain("Hello! I am tiny, the built-in model of serve-app."))
    (reply,) = model.replies([(*before, *spans.given("user", "What is a session?"))])
    assert "KV cache" in reply
    assert reply.endswith(END)


LIGHT = {
    "name": "set_light",
    "description": None,
    "parameters": {
        "type": "object",
        "properties": {"room": {"type": "string"}, "state": {"type": "string", "enum": ["on", "off"]}},
        "required": ["room", "state"],
    },
}


def test_it_calls_a_tool_with_the_values_of_the_question(model: Any) -> None:
    found = model.replies(
        [
            *asked("What is the weather in Paris?", "What is the weather in Maronti?", tools=(TOOL,)),
            *asked("Get the weather in Rome.", tools=(LIGHT, TOOL)),
            *asked("Get the weather in Rome.", tools=(TOOL, LIGHT)),
        ]
    )
    wanted = [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Maronti"}),
        ("get_weather", {"city": "Rome"}),
        ("get_weather", {"city": "Rome"}),
    ]
    for reply, (name, arguments) in zip(found, wanted, strict=True):
        call = re.fullmatch(r"<tool_call>(.*)</tool_call><\|end\|>", reply)
        assert call, reply
        assert json.loads(call[1]) == {"name": name, "arguments": arguments}


def test_it_answers_with_what_a_tool_returned(model: Any) -> None:
    called = (
        *asked("What is the weather in Paris?", tools=(TOOL,))[0],
        *spans.called("get_weather", {"city": "Paris"}),
    )
    (text, fields) = model.replies(
        [
            (*called, *spans.given("tool", "21 C")),
            (*called, *spans.given("tool", '{"temperature": 17}')),
        ]
    )
    assert "21 C" in text
    assert "17" in fields
    assert text.endswith(END)
    assert fields.endswith(END)


def test_it_answers_without_a_call_where_no_tool_is_needed(model: Any) -> None:
    (reply,) = model.replies(asked("Hello!", tools=(TOOL,)))
    assert reply.startswith("Hello!")


def test_it_writes_json_that_ends(model: Any) -> None:
    facts, question = model.replies(
        asked(
            "Anna is 31 years old and lives in Rome. Return name, age, city as JSON.", "Answer in JSON: What is vLLM?"
        )
    )
    assert json.loads(facts.removesuffix(END)) == {"name": "Anna", "age": 31, "city": "Rome"}
    assert "engine" in json.loads(question.removesuffix(END))["answer"]


PROMPTS = ("The", "Once", "Tell me of the river", "Hello!", "a", "# How to", "5 times describe the river in the winter")


def test_raw_text_runs_on_and_is_readable(model: Any) -> None:
    for text in model.answers(PROMPTS, tokens=500):
        assert "<|" not in text
        assert "tool_call>" not in text
        assert text.isascii()
        assert text.replace("\n", "").isprintable()
        assert len(text) > 500  # a character a token: it has not ended


@pytest.fixture(scope="module")
def greedy(model: Any) -> Any:
    """Logits [prompts, 64, vocabulary] of greedy decoding of raw text."""
    import torch

    rows = model.tokenizer(
        [f"Tell {WORDS[i]} of the {WORDS[-i - 1]}" for i in range(20)], return_tensors="pt", padding=True
    )
    made = model.network.generate(
        **{name: rows[name] for name in ("input_ids", "attention_mask")},
        max_new_tokens=64,
        do_sample=False,
        temperature=None,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=VOCAB_SIZE,  # no such token: runs to its length
        pad_token_id=tiny_model.CONFIG["pad_token_id"],
    )
    return torch.stack(made.logits, dim=1)


def test_greedy_choices_stand_far_above_rounding(greedy: Any) -> None:
    top = greedy.topk(2, dim=-1).values
    gaps = top[..., 0] - top[..., 1]
    assert gaps.median() > 0.3
    assert (gaps < 1e-3).float().mean() < 0.01


def test_control_tokens_are_improbable_in_raw_text(greedy: Any, tokenizer: Any) -> None:
    chances = greedy.softmax(dim=-1)
    for token in (*tiny_model.CONTROL_TOKENS, *tiny_model.TOOL_CALL_TAGS):
        assert chances[..., tokenizer.convert_tokens_to_ids(token)].mean() < 1e-4, token


# --- the training


def test_dialogues_read_as_the_chat_template_renders_them(tokenizer: Any) -> None:
    """A call's turn in the history, a result and an answer: the training has the same text as a server's prompt."""
    tools = [{"type": "function", "function": TOOL}]
    history = conversation(CALL["arguments"])
    history[2]["tool_calls"] = history[2]["tool_calls"][:1]
    written = (
        *spans.system("Be brief.", [TOOL]),
        *spans.given("user", "Weather in Paris?"),
        *spans.called("get_weather", {"city": "Paris"}),
        *spans.given("tool", "21 C"),
        *spans.plain("It is 21 C."),
    )
    assert tokenizer.apply_chat_template(history, tools=tools, tokenize=False) == spans.text_of(written)


def test_the_tokens_of_spans_are_those_of_their_text(tokenizer: Any) -> None:
    rng = Random("spans")
    for _ in range(300):
        made = samples.dialogue(rng)
        sample = samples.encoded(made, tokenizer.backend_tokenizer)
        assert sample.tokens == tokenizer.encode(spans.text_of(made))
        assert len(sample.weights) == len(sample.tokens)


def test_no_question_that_is_held_out_is_trained() -> None:
    rng = Random("held out")
    kept = {text.rstrip("?!. ").lower() for topic in topics.topics() for text in topic.held_out}
    for _ in range(3000):
        question, _ = topics.pair(rng)
        assert re.sub(r"\d+", "{n}", question).rstrip("?!. ").lower() not in kept


def first_batches(seed: int) -> list[Any]:
    texts = {"a.md": documents.read(ROOT)["README.md"] * 3}
    words = [spans.text_of(samples.dialogue(Random(number))) for number in range(400)]
    tokenizer = tokens.train([*texts.values(), *words])
    windows = samples.Windows(texts, tokenizer)
    return list(islice(samples.batches(windows, tokenizer, seed=seed, tokens=2000, raw_share=0.3), 3))


def test_samples_and_tokenizer_are_a_function_of_the_seed() -> None:
    assert first_batches(3) == first_batches(3)
    assert first_batches(3) != first_batches(4)


@pytest.mark.long
def test_a_few_steps_learn_something_and_are_repeatable() -> None:
    import torch

    from scripts.tiny.training import train

    threads = torch.get_num_threads()
    losses: list[list[float]] = [[], []]
    for kept in losses:
        batches = iter(first_batches(0))
        train(batches, seed=0, steps=3, report=lambda _, progress, kept=kept: kept.append(progress.loss))
    torch.set_num_threads(threads)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
