"""Graphs of tiny models are traced, hardly run: what tracing does not need is switched off."""

import logging

import torch

torch.set_num_threads(1)  # more only cost time
logging.getLogger("torch.__trace").propagate = False  # megabytes of records that pytest would keep for its reports
