"""Makes the helpers beside this file importable: `models` (tiny models) and `equality` (a plan against one process)."""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
