"""All bugs, in the order of an execution's life: run, checkpoint, claim, each store's own, and the short ways."""

from __future__ import annotations

from tests.sabotage import bugs_claim as _claim
from tests.sabotage import bugs_run as _run
from tests.sabotage import bugs_short as _short
from tests.sabotage import bugs_stores as _stores
from tests.sabotage.bug import BUGS, NothingToPlantError, edit, replace

__all__ = ["BUGS", "NothingToPlantError", "edit", "replace"]
_ = (_run, _claim, _stores, _short)
