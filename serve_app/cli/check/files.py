"""The findings about files of this machine that settings name: without them a start would fail."""

from __future__ import annotations

from pathlib import Path

from serve_app.cli.check.findings import Finding, finding
from serve_app.errors import ConfigError
from serve_app.http.tokens import JwksError, parse_key_set, read_jwks_file
from serve_app.settings import Settings
from serve_app.system import Tls

JINJA = frozenset("{}\n")  # vLLM takes what has none of these as a file's name


def check_templates(settings: Settings) -> list[Finding]:
    """Chat templates that are files and not there."""
    return [
        finding(
            "wrong_value",
            f"models.{index}.chat_template",
            problem=f"there is no file {model.chat_template}",
            advice="correct the path, or put the template itself there",
        )
        for index, model in enumerate(settings.models)
        if model.engine != "simulated" and _is_missing(model.chat_template)
    ]


def check_certificate(settings: Settings) -> list[Finding]:
    """A certificate of the endpoint that cannot be read, or whose key is another's."""
    tls = settings.http.tls
    if tls is None:
        return []
    try:
        Tls.at(tls.certificate, tls.key).read()
    except ConfigError as error:
        why = error.message.removeprefix("http.tls: ")
        return [finding("wrong_value", "http.tls", problem=why, advice="name two PEM files that fit each other")]
    return []


def check_jwks(settings: Settings) -> list[Finding]:
    """A file of an issuer's keys that cannot be read, or keys in it that are not used."""
    jwt = settings.auth.jwt
    if jwt is None or jwt.jwks_file is None:
        return []
    try:
        found = parse_key_set(read_jwks_file(jwt.jwks_file), jwt.algorithms)
    except JwksError as error:
        advice = "save there what the `jwks_uri` of the issuer answers"
        return [finding("wrong_value", "auth.jwt.jwks_file", problem=str(error), advice=advice)]
    return [finding("jwks_key_unused", "auth.jwt.jwks_file", reason=reason) for reason in found.left_out]


def _is_missing(template: str | None) -> bool:
    return template is not None and JINJA.isdisjoint(template) and not Path(template).exists()
