"""API keys: who is let in, what is never said, and a key file that stays ours."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import ConfigError, Unauthorized
from serve_app.http.keys import KeyRing, configured_key, tenant_salt
from serve_app.settings import AuthSettings, KeySettings, Settings, load_or_create_key, parse
from serve_app.types import RequestClass
from tests.fakes.stores import no_keys

ALICE = "sk-alice-0123456789"
BOB = "sk-bob-é-0123456789"
RING = KeyRing(
    AuthSettings(
        keys=(
            KeySettings(key=ALICE, tenant="alice", max_class="critical", default_class="high"),
            KeySettings(
                key_sha256=hashlib.sha256(BOB.encode()).hexdigest(), tenant="bob", max_class="low", default_class="low"
            ),
        )
    ),
    no_keys(),
)
WAIT_S = 30.0  # of a start-up race of a few processes; seconds on a busy machine, a hang otherwise


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"host": b"x", b"authorization": b"Bearer " + key.encode()}


def refusal(headers: dict[bytes, bytes]) -> Unauthorized:
    with pytest.raises(Unauthorized) as caught:
        RING.identify(headers)
    assert caught.value.status == 401
    return caught.value


def test_a_key_gives_tenant_and_classes() -> None:
    alice = RING.identify(bearer(ALICE))
    assert (alice.tenant, alice.max_class, alice.default_class) == ("alice", RequestClass.CRITICAL, RequestClass.HIGH)


def test_a_key_known_by_its_hash_alone_is_let_in() -> None:
    bob = RING.identify(bearer(BOB))
    assert (bob.tenant, bob.max_class) == ("bob", RequestClass.LOW)


@pytest.mark.parametrize(
    "headers",
    [
        {b"authorization": f"bearer {ALICE}".encode()},
        {b"authorization": f"Bearer  {ALICE} ".encode()},
        {b"x-api-key": ALICE.encode()},
        {b"api-key": ALICE.encode()},
        {b"authorization": f"Bearer {ALICE}".encode(), b"x-api-key": b"sk-something-else"},
    ],
)
def test_the_forms_a_key_may_come_in(headers: dict[bytes, bytes]) -> None:
    assert RING.identify(headers).tenant == "alice"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        ALICE.encode(),
        b"Basic " + ALICE.encode(),
        b"Bearer" + ALICE.encode(),
        b"Bearer " + ALICE.encode()[:-1],
        b"Bearer " + ALICE.encode() + b"x",
        b"Bearer " + ALICE.upper().encode(),
        b"Bearer " + hashlib.sha256(ALICE.encode()).hexdigest().encode(),
        b"Bearer " + hashlib.sha256(ALICE.encode()).digest(),
        b"Bearer " + b"x" * 100_000,
        b"Bearer \xff\x00",
    ],
)
def test_anything_else_is_refused_without_an_echo(value: bytes) -> None:
    error = refusal({b"authorization": value})
    assert "alice" not in str(error.body())
    assert "xxx" not in str(error.body())


def test_an_unknown_key_is_refused_in_openais_words() -> None:
    """LiteLLM 1.106 raises `BadRequestError` for a 401 whose message lacks them."""
    assert "Incorrect API key provided" in refusal(bearer("sk-unknown-0123456789")).message


def test_no_key_is_refused_with_how_to_send_one() -> None:
    assert "Authorization" in refusal({}).message
    assert "Authorization" in refusal({b"x-api-key": b""}).message


def test_a_wrong_authorization_is_not_made_good_by_the_other_header() -> None:
    refusal({b"authorization": b"Bearer wrong-0123456789abc", b"x-api-key": ALICE.encode()})


@given(st.dictionaries(st.sampled_from([b"authorization", b"x-api-key", b"api-key", b"x"]), st.binary(max_size=40)))
def test_no_headers_by_chance_are_let_in(headers: dict[bytes, bytes]) -> None:
    refusal(headers)


def test_no_key_at_all_is_no_way_to_start() -> None:
    with pytest.raises(ConfigError) as caught:
        KeyRing(AuthSettings(), no_keys())
    assert caught.value.param == "auth.keys"


def test_a_generated_key_serves_alone(tmp_path: Path) -> None:
    key = load_or_create_key(tmp_path / "key")
    ring = KeyRing(Settings(auth=AuthSettings(keys=(KeySettings(key=ALICE),))).with_key(key).auth, no_keys())
    owner = ring.identify(bearer(key))
    assert (owner.tenant, owner.admin, owner.max_class) == ("default", True, RequestClass.CRITICAL)
    with pytest.raises(Unauthorized):
        ring.identify(bearer(ALICE))


def test_a_key_given_twice_is_named_even_as_key_and_hash() -> None:
    twice = {"keys": [{"key": ALICE}, {"key_sha256": hashlib.sha256(ALICE.encode()).hexdigest()}]}
    with pytest.raises(ConfigError, match=r"auth\.keys\.1"):
        KeyRing(parse({"auth": twice}).auth, no_keys())


def test_generated_keys_are_long_and_never_the_same(tmp_path: Path) -> None:
    keys = {load_or_create_key(tmp_path / str(number)) for number in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("sk-") and len(key) == 46 and key.isascii() for key in keys)


def test_salts_differ_between_tenants_and_secrets_and_are_what_vllm_takes() -> None:
    salt = tenant_salt(b"s", "a")
    assert salt == tenant_salt(b"s", "a")
    assert len({salt, tenant_salt(b"s", "b"), tenant_salt(b"t", "a"), tenant_salt(b"s", "")}) == 4
    assert len(salt) == 43
    assert not set(salt) & set("@/\\\0")


def test_a_key_file_is_made_once_with_mode_0600_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "key"
    key = load_or_create_key(file)
    assert load_or_create_key(str(file)) == key
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in file.parent.iterdir()] == ["key"]


def test_threads_that_start_at_once_get_the_same_key(tmp_path: Path) -> None:
    for round_number in range(20):
        file = tmp_path / f"key{round_number}"
        barrier = threading.Barrier(8)
        got: list[str] = []

        def start(file: Path = file, barrier: threading.Barrier = barrier, got: list[str] = got) -> None:
            barrier.wait(WAIT_S)
            got.append(load_or_create_key(file))

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(got) == 8
        assert len(set(got)) == 1
    assert len(list(tmp_path.iterdir())) == 20


def test_processes_that_start_at_once_get_the_same_key(tmp_path: Path) -> None:
    code = (
        "import sys; from serve_app.settings.key_file import load_or_create_key; print(load_or_create_key(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "key")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    keys = {process.communicate(timeout=WAIT_S)[0].strip() for process in running}
    assert all(process.returncode == 0 for process in running)
    assert keys == {load_or_create_key(tmp_path / "key")}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o602, 0o610])
def test_a_key_file_others_can_touch_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    load_or_create_key(file)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {file}") as caught:
        load_or_create_key(file)
    assert caught.value.param == "auth.key_file"


def test_a_key_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    load_or_create_key(file)
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="owned by user"):
        load_or_create_key(file)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"x" * 600, b"sk-\xff\xff0123456789abcdef", b"sk-one-0123456789\nsk-two"]
)
def test_a_file_that_holds_no_key_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="no API key"):
        load_or_create_key(file)
    assert file.read_bytes() == content


def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    folder = tmp_path / "folder"
    dangling = tmp_path / "link"
    os.mkfifo(pipe, 0o600)
    folder.mkdir()
    dangling.symlink_to(tmp_path / "nowhere")
    for path in (pipe, folder, dangling, pipe / "key"):
        with pytest.raises(ConfigError, match="key_file"):
            load_or_create_key(path)
    assert {p.name for p in tmp_path.iterdir()} == {"pipe", "folder", "link"}


def test_a_key_may_be_named_as_one_without_a_name_is_called() -> None:
    first = "a" * 20
    second = "b" * 20
    called = configured_key(KeySettings(key=first)).key_id
    given = KeySettings(key=first, tenant="x"), KeySettings(key=second, name=called, tenant="y")
    ring = KeyRing(AuthSettings(keys=given), no_keys())
    found = [ring.identify({b"authorization": f"Bearer {key}".encode()}) for key in (first, second)]
    assert [(one.key_id, one.tenant) for one in found] == [(called, "x"), (called, "y")]
