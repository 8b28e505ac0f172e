"""Routers and the quota actor's line over a network that loses, repeats and reorders, with an actor that dies.

What is checked: nothing begins where there is no room, every request ends once, none passes a higher class later than
one exchange after that one came, and in the end both sides count the same.
"""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from serve_app.types import RequestClass
from tests.core.shared_queue.world import MODEL, World
from tests.effort import effort

ROUTERS = 3
names = st.sampled_from([f"r{number}" for number in range(ROUTERS)])
levels = st.sampled_from(list(RequestClass))
spans = st.sampled_from([0.0, 0.05, 0.3, 0.3, 1.0, 2.0, 4.5, 10.0])


class Network(RuleBasedStateMachine):
    """Three routers, two engines, the actor and everything on its way between them."""

    @initialize()
    def start(self) -> None:
        self.world = World({"e1": (4, 120), "e2": (3, 120)}, ROUTERS)
        self.engines = itertools.count(3)
        self.world.settle(4)

    @rule(
        name=names, level=levels, slots=st.integers(1, 2), tokens=st.integers(1, 50), left=st.sampled_from([None, 3.0])
    )
    def arrive(self, name: str, level: RequestClass, slots: int, tokens: int, left: float | None) -> None:
        self.world.arrive_in_order(name, level, slots, tokens, left)

    @rule(name=names, data=st.data())
    def cancel(self, name: str, data: st.DataObject) -> None:
        live = [one for one, req in self.world.routers[name].requests.items() if req.state in ("waits", "runs")]
        if live:
            self.world.cancel(name, data.draw(st.sampled_from(live)))

    @rule(name=names, data=st.data())
    def finish(self, name: str, data: st.DataObject) -> None:
        running = list(self.world.routers[name].running)
        if running:
            self.world.finish(name, data.draw(st.sampled_from(running)))

    @rule(name=names, data=st.data(), tokens=st.integers(1, 20))
    def grow(self, name: str, data: st.DataObject, tokens: int) -> None:
        running = list(self.world.routers[name].running)
        if running:
            self.world.routers[name].queue.in_flight.grow(data.draw(st.sampled_from(running)), tokens, self.world.now)

    @rule(name=names, beat=st.booleans())
    def speak(self, name: str, beat: bool) -> None:
        self.world.speak(name, beat=beat)

    @rule(name=names)
    def watch(self, name: str) -> None:
        self.world.watch(name)

    @rule(index=st.integers(0, 5), keep=st.booleans())
    def deliver(self, index: int, keep: bool) -> None:
        """A message arrives; `keep`: it will do so once more."""
        connection = self.world.in_transit
        if index < len(connection):
            answer = self.world.deliver(connection[index] if keep else connection.pop(index))
            if answer is not None:
                connection.append(answer)

    @rule()
    def deliver_all(self) -> None:
        """The network does nothing wrong for a moment."""
        self.world.settle(1)

    @rule(index=st.integers(0, 5), noticed=st.booleans())
    def lose(self, index: int, noticed: bool) -> None:
        """A message is lost, and its router may notice that."""
        if index < len(self.world.in_transit):
            name = self.world.in_transit.pop(index).router
            if noticed:
                self.world.give_up(name)

    @rule(name=names)
    def give_up(self, name: str) -> None:
        """A router thinks that an answer does not come any more."""
        self.world.give_up(name)

    @rule(span_s=spans)
    def wait(self, span_s: float) -> None:
        self.world.wait(span_s)

    @rule()
    def crash(self) -> None:
        self.world.crash()

    @rule(name=names)
    def restart_router(self, name: str) -> None:
        """A router dies with all its requests, and another one comes up under its name."""
        self.world.restart_router(name)

    @rule(name=names, usable=st.booleans())
    def eject(self, name: str, usable: bool) -> None:
        router = self.world.routers[name]
        self.world.perform(router, router.queue.set_reachability(MODEL, "e1", usable, self.world.now))

    @rule()
    def replace_engine(self) -> None:
        """The second engine ends, and another one starts; the routers notice one by one."""
        self.world.end_engine(max(self.world.reports))
        self.world.start_engine(f"e{next(self.engines)}", 3, 120)

    @rule(name=names)
    def notice(self, name: str) -> None:
        self.world.notice(name)

    @rule()
    def engines_fall_silent(self) -> None:
        """They are taken for gone, and are not."""
        self.world.wait(10.0, engines_speak=False)

    @invariant()
    def no_account_is_beyond_the_ledgers(self) -> None:
        if hasattr(self, "world"):
            self.world.check_accounts()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.bring_to_rest()


HISTORIES = settings(  # the sums are checked after every step, and each history is brought to rest in the end
    max_examples=effort(20, 3000), stateful_step_count=effort(40, 100), suppress_health_check=list(HealthCheck)
)


def test_one_queue_whatever_the_network_does() -> None:
    run_state_machine_as_test(Network, settings=HISTORIES)
