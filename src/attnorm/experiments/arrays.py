"""The arrays that experiments compute with."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
