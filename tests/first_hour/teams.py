"""The three teams of docs/tutorials/three-teams.md: its file, and what each team may do."""

from __future__ import annotations

from typing import Any

import yaml

from tests.first_hour import documents
from tests.first_hour.asking import Endpoint, require
from tests.first_hour.newcomer import Newcomer
from tests.first_hour.walk import StepFailedError

CLASSES = ("low", "normal", "high", "critical")
DEFAULT_MAX_CLASS = "high"  # of a key, docs/reference/settings.md
DEFAULT_CLASS = "normal"


class Teams:
    """The keys of the file, and the requests that each of them has made."""

    def __init__(self, newcomer: Newcomer) -> None:
        self._newcomer = newcomer
        self._config = documents.three_teams()
        self._model: str = self._config["models"][0]["name"]
        keys: list[dict[str, Any]] = self._config["auth"]["keys"]
        self._teams = {key["tenant"]: key for key in keys if not (key.get("admin") or key.get("metrics"))}
        (self._operator,) = [key["key"] for key in keys if key.get("admin")]
        (self._scraper,) = [key["key"] for key in keys if key.get("metrics")]
        self._endpoint = Endpoint("", "")
        self._answers: dict[str, str] = {}

    def deploy(self, endpoint: Endpoint) -> str:
        config = self._newcomer.file("teams.yaml", yaml.safe_dump(self._config))
        self._newcomer.serve_app("check", config)
        self._newcomer.serve_app("deploy", "--config", config)
        self._endpoint = endpoint
        require(endpoint.get("/v1/models"), 401, "invalid_api_key")  # the owner's key is not in the file
        return f"{self._model} serves {', '.join(self._teams)}; the generated key is out"

    def ask(self) -> str:
        reported = []
        for name, key in self._teams.items():
            answer = require(self._of(key["key"]).chat(self._model), 200)
            self._answers[name] = answer["id"]
            receipt = self._receipt(self._operator, answer["id"], 200)
            wanted = (name, key.get("default_class", DEFAULT_CLASS))
            if (receipt["tenant"], receipt["request_class"]) != wanted:
                raise StepFailedError(f"{receipt}, not of {wanted}")
            reported.append(f"{name} as {wanted[1]}")
        return ", ".join(reported)

    def ask_above(self) -> str:
        reported = []
        for name, key in self._teams.items():
            above = CLASSES[CLASSES.index(key.get("max_class", DEFAULT_MAX_CLASS)) + 1]
            require(self._of(key["key"]).chat(self._model, priority=above), 403, "permission_denied")
            reported.append(f"{name} as {above}")
        return f"403: {', '.join(reported)}"

    def read_receipts(self) -> str:
        """Each with its own key, and no other's. An operator reads all."""
        for name, key in self._teams.items():
            for other, answer in self._answers.items():
                self._receipt(key["key"], answer, 200 if other == name else 404)
            reported = self._newcomer.serve_app("explain", self._answers[name], "--key", key["key"])
            if f"request of {name} to {self._model}, answered" not in reported:
                raise StepFailedError(reported)
            self._receipt(self._operator, self._answers[name], 200)
        return "each reads its own, another's is a 404; the operator reads all"

    def read_metrics(self) -> str:
        scraper = self._of(self._scraper)
        answer = scraper.get("/metrics")
        require(answer, 200)
        lacking = [name for name in self._teams if f'tenant="{name}"' not in answer.text]
        if lacking:
            raise StepFailedError(f"nothing of {lacking} in\n{answer.text}")
        require(scraper.get("/admin/quota"), 403, "model_not_allowed")
        for name, key in self._teams.items():
            require(self._of(key["key"]).get("/metrics"), 403, "not_admin")
            require(scraper.get(f"/admin/requests/{self._answers[name]}"), 403, "model_not_allowed")
        return "the scraper's key reads them, teams get 403; it reads no receipt of theirs and no ledger"

    def _of(self, key: str) -> Endpoint:
        return self._endpoint.with_key(key)

    def _receipt(self, key: str, answer: str, status: int) -> dict[str, Any]:
        code = "request_not_found" if status == 404 else None
        return require(self._of(key).get(f"/admin/requests/{answer}"), status, code)
