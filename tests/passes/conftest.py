"""Graphs of tiny models are traced, hardly run: more threads than one only cost time."""

import torch

torch.set_num_threads(1)
