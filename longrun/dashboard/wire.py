"""JSON on the wire: no stored number or letter may break an answer.

Place in the life of an execution: whenever somebody looks.
"""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import Response


def to_json(value: Any) -> str:
    """JSON as browsers read it. A step may report progress that is no finite number; it becomes null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def reply(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json")
