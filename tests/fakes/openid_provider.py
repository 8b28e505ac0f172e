"""A small OpenID provider on loopback, of Authlib's parts: discovery, its keys, and access tokens (RFC 9068) for
clients that prove who they are."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

import requests
from authlib.oauth2.rfc6749 import AuthorizationServer, ClientMixin, OAuth2Request
from authlib.oauth2.rfc6749.grants import ClientCredentialsGrant
from authlib.oauth2.rfc6749.requests import BasicOAuth2Payload
from authlib.oauth2.rfc9068 import JWTBearerTokenGenerator
from joserfc.jwk import ECKey, KeySet, RSAKey

from tests.waiting import patient

AUDIENCE = "serve-app"
LASTS_S = 300
ANSWER_S = 10.0
DISCOVERY = "/.well-known/openid-configuration"
KEYS = "/protocol/certs"
TOKENS = "/protocol/token"
TOKEN_URI = f"https://login.example{TOKENS}"  # what Authlib is told: it insists on TLS
CLIENTS: dict[str, dict[str, Any]] = {
    "agent": {"team": "research", "realm_access": {"roles": ["callers"]}, "llm_models": ["tiny-sim"]},
    "operator": {"team": "platform", "realm_access": {"roles": ["llm-operators"]}, "llm_models": ["tiny-sim"]},
}


class _Client(ClientMixin):  # type: ignore[misc]
    def __init__(self, client_id: str) -> None:
        self.client_id = client_id

    def get_client_id(self) -> str:
        return self.client_id

    def get_allowed_scope(self, scope: str | None) -> str:
        return scope or ""

    def check_client_secret(self, client_secret: str) -> bool:
        return client_secret == f"secret of {self.client_id}"

    def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
        return (method, endpoint) == ("client_secret_post", "token")

    def check_grant_type(self, grant_type: str) -> bool:
        return grant_type == "client_credentials"


class _Grant(ClientCredentialsGrant):  # type: ignore[misc]
    TOKEN_ENDPOINT_AUTH_METHODS = ("client_secret_post",)


class _Tokens(JWTBearerTokenGenerator):  # type: ignore[misc]
    """Signs with the keys that the provider has now."""

    def __init__(self, provider: OpenIdProvider, algorithm: str) -> None:
        super().__init__(provider.issuer, alg=algorithm, expires_generator=LASTS_S)
        self._provider = provider

    def get_jwks(self) -> KeySet:
        return self._provider.signing

    def get_audiences(self, client: _Client, user: Any, scope: str) -> list[str]:
        return [AUDIENCE, "account"]

    def get_extra_claims(self, client: _Client, grant_type: str, user: Any, scope: str) -> dict[str, Any]:
        return CLIENTS[client.client_id]


class OpenIdProvider(AuthorizationServer):  # type: ignore[misc]
    """Answers at `issuer`.

    Attributes:
        signing: the keys that sign, the newest alone; `published`: those of the JWKS.
    """

    def __init__(self, issuer: str, algorithm: str = "RS256") -> None:
        super().__init__()
        self.issuer = issuer
        self._algorithm = algorithm
        self._count = 0
        self.published: list[RSAKey | ECKey] = []
        self.rotate()
        self.register_grant(_Grant)
        self.register_token_generator("default", _Tokens(self, algorithm))

    def rotate(self) -> None:
        """Sign with a new key from now on, and publish no other."""
        self._count += 1
        names = {"kid": f"key-{self._count}", "use": "sig", "alg": self._algorithm}
        is_rsa = self._algorithm.startswith(("RS", "PS"))
        key = RSAKey.generate_key(2048, names) if is_rsa else ECKey.generate_key("P-256", names)
        self.published = [key]
        self.signing = KeySet([key])

    def discovery(self) -> dict[str, Any]:
        return {"issuer": self.issuer, "jwks_uri": self.issuer + KEYS, "token_endpoint": self.issuer + TOKENS}

    def settings(self) -> dict[str, Any]:
        """`auth.jwt` of an endpoint that accepts its tokens."""
        return {
            "issuer": self.issuer,
            "audience": AUDIENCE,
            "jwks_url": self.issuer + KEYS,
            "algorithms": [self._algorithm],
            "claims": {"tenant": "team", "models": "llm_models", "roles": "realm_access.roles"},
            "roles": {"admin": "llm-operators"},
        }

    def jwks(self) -> dict[str, Any]:
        return {"keys": [key.as_dict(private=False) for key in self.published]}

    def token_of(self, client: str) -> str:
        """A token that the client has asked for over HTTP."""
        form = {"grant_type": "client_credentials", "client_id": client, "client_secret": f"secret of {client}"}
        answer = requests.post(self.issuer + TOKENS, data=form, timeout=patient(ANSWER_S))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["access_token"])

    def token(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """The status and the answer of the token endpoint."""
        answer: tuple[int, dict[str, Any]] = self.create_token_response(form)
        return answer

    # What Authlib asks of a framework.

    def query_client(self, client_id: str) -> _Client | None:
        return _Client(client_id) if client_id in CLIENTS else None

    def save_token(self, token: dict[str, Any], request: OAuth2Request) -> None:
        """Tokens are kept nowhere."""

    def create_oauth2_request(self, request: dict[str, str]) -> OAuth2Request:
        made = _Form("POST", TOKEN_URI)
        made.payload = BasicOAuth2Payload(request)
        return made

    def handle_response(self, status: int, body: Any, headers: Any) -> tuple[int, Any]:
        return status, body

    def send_signal(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Nobody listens."""


class _Form(OAuth2Request):  # type: ignore[misc]
    @property
    def form(self) -> dict[str, str]:
        form: dict[str, str] = self.payload.data
        return form


@contextlib.contextmanager
def serving(algorithm: str = "RS256") -> Iterator[OpenIdProvider]:
    """A provider that answers over HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {DISCOVERY: provider.discovery, KEYS: provider.jwks}
            self._answer(*((200, pages[self.path]()) if self.path in pages else (404, {})))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            self._answer(*provider.token(dict(parse_qsl(body))))

        def _answer(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Not to the terminal of the tests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider = OpenIdProvider(f"http://127.0.0.1:{server.server_port}", algorithm)
        thread = threading.Thread(target=server.serve_forever, name="OpenID provider")
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()
