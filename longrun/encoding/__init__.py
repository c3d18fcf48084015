"""Checkpoint: how values become JSON text. `longrun.codec` is the way in; nothing else imports from here."""
