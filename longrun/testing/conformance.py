"""`StoreConformance`: the whole contract of `StoreBackend` and `CheckpointStore` as tests, for any store.

Subclass it in a test file, and say how a store is made::

    class TestMyStore(StoreConformance):
        @pytest.fixture(autouse=True)
        def place(self, tmp_path):
            self.path = tmp_path / "store"

        def make_store(self):
            return MyCheckpointStore(self.path)

A store that promises less says so with `durable = False`, `fenced = False` or `shared = False`, and is tested for the
rest. The asynchronous tests need only anyio's own pytest plugin, in any mode; with trio installed they run on both.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *(
        f"longrun.testing.conformance_{part}"
        for part in ("base", "write", "move", "messages", "claim", "read", "find", "shared", "names", "async", "seal")
    )
)

from longrun.testing.conformance_async import AsyncContract, GroupCommitContract  # noqa: E402 -- after the line above
from longrun.testing.conformance_claim import ClaimContract, DueContract, OwnerContract  # noqa: E402
from longrun.testing.conformance_find import FindContract, SearchContract  # noqa: E402
from longrun.testing.conformance_messages import MessageContract  # noqa: E402
from longrun.testing.conformance_move import MoveContract  # noqa: E402
from longrun.testing.conformance_names import NameContract, PayloadContract  # noqa: E402
from longrun.testing.conformance_read import CheckpointContract, DeleteContract  # noqa: E402
from longrun.testing.conformance_seal import SealContract  # noqa: E402
from longrun.testing.conformance_shared import LifeContract, SharedContract, WaitContract  # noqa: E402
from longrun.testing.conformance_write import CreateContract, EntryContract, SaveContract  # noqa: E402


class StoreConformance(
    CreateContract,
    SaveContract,
    EntryContract,
    MoveContract,
    MessageContract,
    ClaimContract,
    OwnerContract,
    DueContract,
    CheckpointContract,
    DeleteContract,
    FindContract,
    SearchContract,
    NameContract,
    PayloadContract,
    LifeContract,
    SharedContract,
    WaitContract,
    AsyncContract,
    GroupCommitContract,
    SealContract,
):
    """Every test of every part. See the module for how to use it."""
