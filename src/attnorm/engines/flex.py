"""placeholder"""
from attnorm.engines.inputs import Inputs
from attnorm.normalizers.contract import Normalizer
from torch import Tensor
def applies(inputs: Inputs, normalizer: Normalizer) -> bool:
    return False
def flex(inputs: Inputs, normalizer: Normalizer) -> Tensor:
    raise NotImplementedError
