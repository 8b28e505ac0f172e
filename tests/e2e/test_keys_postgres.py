"""Two routers on a real PostgreSQL, without the store's actor; the server ends and comes back under them."""

from __future__ import annotations

import pytest

from tests.e2e import stack as stacks
from tests.e2e.test_keys import ACTOR_BACK_S, BUSY_S, FOLLOW_S, KEYS, actor, follows, make, statuses
from tests.e2e.three import MODEL, RESTART_S, routers
from tests.fakes.postgres import postgres_server
from tests.requires import requires
from tests.waiting import wait_until

requires("linux")
pytestmark = pytest.mark.long  # a stack of its own; tests/store has everything below the routers

ROUTERS = 2


def test_routers_follow_postgresql_and_go_on_without_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    with postgres_server() as server:
        config = {
            "models": [{"name": MODEL, "engine": "simulated", "max_num_seqs": 4}],
            "router": {"replicas": ROUTERS},
            "store": {"url": server.new_database()},
        }
        with stacks.own(tmp_path_factory.mktemp("postgres"), config, "postgres") as own_stack:
            wait_until(lambda: len(routers(own_stack)), RESTART_S, "routers", wanted=ROUTERS)
            each = routers(own_stack)
            made = make(each[0])
            follows(each, made["key"], 200, "a new key")
            assert actor(own_stack) is None
            server.stop()
            assert own_stack.get(KEYS).status_code == 503
            wait_until(
                lambda: statuses(each, made["key"]), FOLLOW_S + BUSY_S, "the key without its store", wanted={200}
            )
            server.start()
            wait_until(lambda: own_stack.get(KEYS).status_code, ACTOR_BACK_S, "the store is back", wanted=200)
            other = make(each[1])
            follows(each, other["key"], 200, "a key made after it")
