"""Anthropic's Messages API in terms of OpenAI's.

Decides: which chat completion a Messages request is, and how an error of ours reads in that API.
In: bodies of requests, errors in OpenAI's form. Out: chat bodies, errors in Anthropic's form.
Never: translates an answer: the engine that makes it does.
"""

from serve_app.core.anthropic.chat_body import chat_body
from serve_app.core.anthropic.errors import error_event, error_of, status_of
from serve_app.core.anthropic.names import client_words

__all__ = ["chat_body", "client_words", "error_event", "error_of", "status_of"]
