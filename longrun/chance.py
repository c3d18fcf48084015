"""Numbers that nobody else has: ids and the start of fencing numbers; and a choice that nobody foresees.

Place in the life of an execution: start. Seeded once from the system's entropy, since asking for it anew is a system
call for every execution; a generator of our own, since a program may seed the common one with a constant.
"""

from __future__ import annotations

import os
import random

_generator = random.Random()
if hasattr(os, "register_at_fork"):  # pragma: no branch -- only Windows lacks it
    os.register_at_fork(after_in_child=_generator.seed)

bits = _generator.getrandbits
sample = _generator.sample
