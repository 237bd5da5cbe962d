import os

import torch

# The models of the suite are tiny: threads would only wait for one another.
torch.set_num_threads(1)

# Kernels run under Triton's interpreter where there is no GPU. Triton reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
