"""Settings for all tests."""

from __future__ import annotations

import importlib.util
import os

# Several tests run several processes on few cores; threads that wait for each other would make them many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
