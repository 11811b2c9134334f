"""The experiment's part of the admin API; mounted by `admin.py`, behind its guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Body, FastAPI, Query, Request

from gateway.config import ConfigError, checked
from gateway.control import Control
from gateway.experiment_table import Experiment

Why = Annotated[str, Query(max_length=500)]


def mount(app: FastAPI, control: Control, changed: Callable[[Request, str, list[str]], dict[str, Any]]) -> None:
    """Adds the routes. `changed` writes the audit line and makes the answer."""

    @app.get("/admin/experiment")
    async def results() -> dict[str, Any]:
        """Arms with requests, attainment and difference to the control, each with an interval; state and reasons."""
        return control.experiments.results()

    @app.get("/admin/experiment/counts")
    async def counts() -> dict[str, Any]:
        """Raw sums by arm and unit, which can be added over gateways."""
        return control.experiments.document()

    @app.post("/admin/experiment")
    async def start(request: Request, table: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
        """Starts one: the keys of an [experiment] table, as {"name": "a", "arms": [{"name": "control"}, ...]}."""
        made = checked(Experiment, table, "experiment")
        return changed(request, "experiment started", control.experiments.start(made, control.config))

    @app.post("/admin/experiment/stop")
    async def stop(request: Request, arm: str | None = None, why: Why = "stopped by an operator") -> dict[str, Any]:
        """Ends it and keeps its results; ?arm=NAME returns one arm's traffic to the control."""
        return changed(request, "experiment stopped", control.experiments.stop(why, arm))

    @app.put("/admin/experiment/weights")
    async def weigh(request: Request, weights: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
        """New weights by arm, as {"control": 3, "candidate": 1}; counting begins anew."""
        wrong = [
            f"weights.{name} = {value!r}: must be a number above 0"
            for name, value in weights.items()
            if isinstance(value, bool) or not isinstance(value, int | float)
        ]
        if wrong or not weights:
            raise ConfigError(wrong or ["weights: name at least one arm"])
        return changed(request, "experiment weighed", control.experiments.weigh(weights))
