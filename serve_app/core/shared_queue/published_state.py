"""What all routers know of the queues: which models and engines have no credit, and the figures of contended queues.

Rules
- A model with waiting requests is contended, and stays so for `CALM_S` after its queue empties.
- Routers keep no credit of an engine with KV debt, nor of one that drains.
- Figures are updated every `FIGURES_S`; those of a queue with an arrival at once.

Invariant: a model becomes contended in the event in which its first request waits.
"""

from __future__ import annotations

import math
from collections.abc import Set

from serve_app.core.shared_queue.delivery import ActorRouterSessions
from serve_app.core.shared_queue.early_refusal import class_figures
from serve_app.core.shared_queue.kv_debt import KvDebt
from serve_app.core.shared_queue.model_queues import ModelQueues

CALM_S = 0.25  # minimum period of withdrawing and granting credit when a queue empties and fills again
FIGURES_S = 0.1  # between updates of the queue figures for early refusal; a queue with an arrival is updated at once


class PublishedState:
    """See the module. O(models with a decision) per event; O(routers) when a model becomes contended or calm.

    Args:
        routers: receive the state.
        models: the queues.
        kv_debt: without credit is each engine that has some.
    """

    def __init__(self, routers: ActorRouterSessions, models: ModelQueues, kv_debt: KvDebt) -> None:
        self._routers = routers
        self._models = models
        self._kv_debt = kv_debt
        self.calm_at: dict[str, float] = {}  # contended models with an empty queue: when they become calm
        self._figures_at = -math.inf

    def update(self, now: float) -> None:
        """Set which models and engines have no credit."""
        models = self._models
        contended = self._contended()
        for model in models.touched | contended:
            admission = models.admission(model)
            if admission is not None and admission.is_contended:
                self.calm_at.pop(model, None)
                contended.add(model)
            elif model in contended and now >= self.calm_at.setdefault(model, now + CALM_S):
                contended.discard(model)
        models.touched.clear()
        for model in self.calm_at.keys() - contended:
            del self.calm_at[model]
        without_credit = frozenset(contended | self._kv_debt.debts.keys() | models.draining_engines)
        self._routers.set_state(self._routers.state._replace(contended=without_credit))

    def update_figures(self, arrived: Set[str], now: float) -> None:
        """Set the figures of contended models, if they are due or the model has new requests."""
        contended = self._contended()
        if now >= self._figures_at + FIGURES_S:
            self._figures_at = now
            arrived = contended
        for model in arrived & contended:
            self._routers.set_figures(model, class_figures(self._models.by_name[model].admission))

    def _contended(self) -> set[str]:
        return {name for name in self._routers.state.contended if name in self._models.by_name}
