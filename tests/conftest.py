import torch

# The models of the suite are tiny: threads would only wait for one another.
torch.set_num_threads(1)
