"""Tokens of an identity provider (JWT), beside API keys.

Decides: whether a token is accepted, whose it is and what its claims give; when the keys of the issuer are read again.
In: the token of a request, `auth.jwt`, the JWKS of the issuer. Out: the same record as a key has, or a 401 or 503.
Never: signs anything, follows an address that a token names, or holds up a request whose key id is known.
"""

from serve_app.http.tokens.follower import JwksFollower
from serve_app.http.tokens.jwks_source import read_jwks_file
from serve_app.http.tokens.key_set import JwksError, parse_key_set
from serve_app.http.tokens.token_source import TokenSource, is_token

__all__ = ["JwksError", "JwksFollower", "TokenSource", "is_token", "parse_key_set", "read_jwks_file"]
