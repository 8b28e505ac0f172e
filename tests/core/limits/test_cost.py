"""What a decision near a limit costs, in steps of the interpreter: the same on every machine."""

from __future__ import annotations

from typing import Any

from serve_app.core.limits import ActorLimits, LimitedRequest, Limits, RouterLimits
from tests.core.interpreter_steps import steps

NEAR = Limits(40.0, 20_000.0, None, None, 8)
FULL = 60  # requests: the bursts are used up then
MAX_STEPS = (
    2_700  # 2,945 before: the key of a request made three times, all limits counted to name one, sets for no day
)


class Pair:
    """A router and the actor, without a network between them."""

    def __init__(self) -> None:
        self._sent: list[Any] = []
        self._answers: list[Any] = []
        self.router = RouterLimits("r", self._sent.append)
        self._actor = ActorLimits(1, lambda to, action: self._answers.append(action), lambda: 1, 0.0)

    def decide(self, number: int) -> str:
        """One request, decided by the actor; what becomes of it."""
        now = 0.5 * number
        request = LimitedRequest(f"q{number}", (("key:1", NEAR),), 500, 0, f"{number}".encode())
        decision = self.router.on_arrive(request, now, is_fenced=False, may_ask=True)
        while self._sent or self._answers:
            for event in self._sent:
                self._actor.on_event("r", event, now)
            self._sent.clear()
            self._actor.after_event(now)
            for action in self._answers:
                self.router.on_action(action, now)
            self._answers.clear()
        decided, self.router.decided = self.router.decided, []
        return type(decision or decided[0]).__name__


def test_a_refusal_near_a_limit_takes_a_bounded_number_of_steps() -> None:
    pair = Pair()
    found = list[str]()
    for number in range(FULL):
        pair.decide(number)
    taken = steps(lambda: found.append(pair.decide(FULL)))
    assert found == ["Refusal"]
    assert taken <= MAX_STEPS
