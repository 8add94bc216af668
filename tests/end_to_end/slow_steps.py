"""In the test's image: a pause after each step, so that endless jobs leave the cores to others.

torch calls `install` at the end of its import: it is an entry point of the group torch.backends.
"""

from __future__ import annotations

import os
import time

SECONDS = "STEP_SECONDS"


def install() -> None:
    """Pause for ``STEP_SECONDS`` after each step of any optimizer; without the variable, do nothing."""
    from torch.optim.optimizer import register_optimizer_step_post_hook  # torch is loaded

    if SECONDS in os.environ:
        pause = float(os.environ[SECONDS])
        register_optimizer_step_post_hook(lambda *_: time.sleep(pause))
