"""Steps that run in child processes and trace something of their own."""

from __future__ import annotations

from typing import Any

from tests.otlp import provider


def traced(state: Any) -> Any:
    with provider(state["url"]).get_tracer("app").start_as_current_span("in the child"):
        return state
