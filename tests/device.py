"""Which device tests use. The root conftest imports this before anything that imports triton.

Triton decides at its first import whether its kernels are compiled or interpreted, and transformers
imports it. Without a GPU they are interpreted, so that every machine tests them.
"""

import os

import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
