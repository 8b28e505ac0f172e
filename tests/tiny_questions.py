"""Asks the built-in model by curl what a new user asks: `python -m tests.tiny_questions`, beside `make serve`.

Twenty questions, a tool call and a JSON answer, each one call of curl with the variables that the README exports. The
README's recording is made of it (`python -m tests.terminal_picture`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Mapping
from typing import Any

# With words that a right answer has.
QUESTIONS: Mapping[str, str] = {
    "What is serve-app?": "vLLM engines on Ray Serve",
    "Who are you?": "tiny",
    "How large are you?": "2.6 million parameters",
    "What can you do?": "call a tool",
    "How do I start serve-app?": "Run make serve",
    "How do I load a real model?": "MODEL=",
    "Do I need a GPU?": "CPU",
    "Which clients can I use?": "OpenAI API",
    "How do I see what runs?": "serve-app status",
    "Why did my request wait?": "serve-app explain",
    "What is a 429?": "Retry-After",
    "How do three teams share a model?": "share",
    "How do I limit a team?": "tokens_per_minute",
    "How do I make a key?": "serve-app keys create",
    "What is a batch?": "serve-app batch submit",
    "What is an agent session?": "KV cache",
    "What happens when an engine dies?": "another engine",
    "How is GPU memory shared?": "ledger",
    "How do I stop the server?": "Ctrl-C",
    "What is the capital of France?": "tiny",
}
WEATHER: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PERSON: Mapping[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALLED = "What is the weather in Paris?"
DESCRIBED = "Maria is 31 years old."
BOLD = "\x1b[1m"
GREY = "\x1b[90m"
PLAIN = "\x1b[0m"
ANSWER_S = 60  # bound of one answer; each takes less than a second on an idle machine


def ask(question: str, **more: Any) -> Mapping[str, Any]:
    """The first choice of a whole answer, asked by curl."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "temperature": 0} | more
    command = ["curl", "-sS", "--fail-with-body", f"{os.environ['OPENAI_BASE_URL']}/chat/completions"]
    command += ["-H", f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}", "-H", "Content-Type: application/json"]
    done = subprocess.run(
        [*command, "-d", json.dumps(body)], capture_output=True, text=True, timeout=ANSWER_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{question} {done.stderr} {done.stdout}")
    choice: Mapping[str, Any] = json.loads(done.stdout)["choices"][0]
    return choice


def called() -> Mapping[str, str]:
    """Name and arguments of the call that a demanded tool gets."""
    choice = ask(CALLED, tools=[WEATHER], tool_choice="required")
    found: Mapping[str, str] = choice["message"]["tool_calls"][0]["function"]
    return found


def described() -> str:
    """The answer under a JSON schema."""
    schema = {"name": "person", "schema": PERSON, "strict": True}
    text: str = ask(DESCRIBED, response_format={"type": "json_schema", "json_schema": schema})["message"]["content"]
    return text


def indented(answer: str) -> str:
    """An answer in lines of the terminal, each indented."""
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(answer, columns, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def main() -> None:
    for question in QUESTIONS:
        choice = ask(question)
        ending = "" if choice["finish_reason"] == "stop" else f" [{choice['finish_reason']}]"
        print(f"{BOLD}{question}{PLAIN}\n{indented(choice['message']['content'] + ending)}")
    call = called()
    print(f"{BOLD}{CALLED}{PLAIN}  {GREY}with a tool, which is demanded{PLAIN}\n  {call['name']}({call['arguments']})")
    print(f"{BOLD}{DESCRIBED}{PLAIN}  {GREY}with a JSON schema{PLAIN}\n  {described()}")


if __name__ == "__main__":
    main()
