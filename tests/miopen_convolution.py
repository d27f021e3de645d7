"""A convolution with bias and leaky relu that tests of MIOpen's calls run: tensors, and exact results."""

import numpy as np
import torch

from miopen_calls import random

X, W, B, Z = random(2, 8, 9, 9), random(16, 8, 3, 3, seed=1), random(16, seed=2), random(2, 16, 9, 9, seed=3)
CONV = torch.nn.functional.conv2d(
    torch.tensor(X, dtype=torch.float64), torch.tensor(W, dtype=torch.float64), padding=1
).numpy()
WITH_BIAS = CONV + B[:, None, None]
LEAKY = np.where(WITH_BIAS > 0, WITH_BIAS, 0.25 * WITH_BIAS)
