"""Few queries over many keys, split over programs, against the blocks in float64, on a GPU or in the interpreter."""

from typing import Any

import pytest
import torch

import attnorm
from attnorm.engines import one_pass
from attnorm.engines.inputs import validate_inputs
from tests.attention.kernel_calls import DEVICE, HALF, assert_compiles, assert_follows, draw, each_depth, mask_of

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

ONE = (2, 4, 2, 1, 520, 24, 40)  # batch, heads, key heads, queries, keys, width, width of the values
WIDE = (1, 4, 2, 1, 300, 192, 256)
SOME = (1, 4, 1, 3, 600, 16, 16)
FLOAT32 = 4e-6


def decoded(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> list[list[Any]]:
    """Output of the kernels, and of the blocks in float64."""
    made = {
        "window and sink": lambda: attnorm.compose(select=attnorm.get("local", window=300), sink="softmax1"),
        "ssmax": lambda: attnorm.get("ssmax", heads=shape[1]),
        "alibi": lambda: attnorm.get("alibi", heads=shape[1]),
    }
    normalizer = made.get(name, lambda: attnorm.get(name))().to(DEVICE)
    tensors = [t.detach() for t in draw(shape, dtype)]
    with torch.no_grad():
        found = attnorm.attention(*tensors, normalizer, causal=True, engine="triton", **options)
        exact = attnorm.attention(*(t.double() for t in tensors), normalizer, causal=True, engine="blocked", **options)
    assert found.dtype == dtype
    return [[found], [exact]]


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "softpick", "scale_invariant", "window and sink"])
def test_one_query(name: str) -> None:
    assert_follows(*decoded(name, WIDE if name == "sigmoid" else ONE), FLOAT32)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("ssmax", "heads"),
        ("relu", "rows"),
        ("kernel", "none"),
        ("alibi", "padding"),
    ],
)
def test_some_queries_of_heads_that_share_keys(name: str, mask: str) -> None:
    assert_follows(*decoded(name, SOME, mask=mask_of(mask, SOME)), FLOAT32)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["softpick", "sigmoid"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    assert_follows(*decoded(name, ONE, dtype), 2 * torch.finfo(dtype).eps)


def test_a_row_that_sees_nothing_is_zero_and_a_nan_stays_one() -> None:
    tensors = [t.detach() for t in draw(SOME)]
    mask = torch.ones(1, 1, 3, 600, dtype=torch.bool, device=DEVICE)
    mask[..., 1, :] = False
    with torch.no_grad():
        assert (attnorm.attention(*tensors, "softpick", mask=mask, engine="triton")[..., 1, :] == 0).all()
        tensors[1][..., 300, :] = torch.nan
        assert attnorm.attention(*tensors, "sigmoid", engine="triton").isnan().all()


def test_what_decoding_has_no_kernel_for() -> None:
    def applies(shape: tuple[int, ...], name: str, **options: Any) -> bool:
        call = validate_inputs(*draw(shape), mask=None, causal=True, scale=None, positions=None)
        return one_pass.applies(call, attnorm.get(name, **options))

    assert not applies(ONE, "sigmoid"), "the inputs need gradients"
    with torch.no_grad():
        assert applies(ONE, "sigmoid")
        assert not applies(ONE, "sa_softmax"), "its rows are searched first"
        assert not applies((1, 1, 1, 1, 200, 16, 16), "sigmoid"), "few keys"
        assert not applies((1, 64, 1, 3, 300, 16, 16), "sigmoid"), "too many rows for a tile"
        assert applies((1, 8, 1, 2, 300, 129, 16), "sigmoid")
        assert not applies((1, 9, 1, 2, 300, 129, 16), "sigmoid"), "too many wide rows in float32"


def test_the_operator_is_described_to_the_compiler() -> None:
    q, k, v = (t.detach() for t in draw(ONE))
    options = ("softmax", 1, 0.0, "none", None, True, None, 0.25, 0.0, 0.0)
    utilities = ("test_schema", "test_faketensor")
    operator = torch.ops.attnorm.decode_attention.default
    torch.library.opcheck(operator, (q, k, v, *[None] * 8, *options), test_utils=utilities)


@each_depth
def test_the_kernels_compile_for_gpus_that_are_not_here(lowered: bool) -> None:
    """The small one is lowered on every commit, so that this machine's Triton is known to do it."""
    script = """
import triton.language as tl
from attnorm.kernels import decoding, one_pass, threshold_maps
from attnorm.kernels.maps import MAPS, RULES
map_ = MAPS["softpick"]
constants = dict(
    MAP=map_.weights, SLOPES=map_.slopes, RULE=RULES["linear"], P=1, FAST=True, REFERENCE=int(map_.reference),
    NORMALISED=True, RULED=3, CAPPED=False, FACTORED=1, EXPONENT=2, SHIFTED=4, SINK=2, CAUSAL=True, WINDOWED=True,
    MASKED=True, PRECISION="tf32", WIDTH=16, SIZE=16, V_WIDTH=16, V_SIZE=12, ROWS=16, COLUMNS=32, LIFT=1.0,
)
types = dict(mask="*u8") | dict.fromkeys(("shift", "scale", "cap", "log2_base", "delta", "floor"), "fp32")
types |= dict.fromkeys(("factor", "exponent", "parameters", "sink", "work"), "*fp32")
types |= dict.fromkeys(("q", "k", "v", "out"), "*bf16")
compiles(one_pass.decode_parts, constants, types)
compiles(one_pass.join_parts, constants, types, lowered=True)
constants |= dict(
    CHUNK=4096, LISTED=1024, NUMBERS=(1.0, 2.0), STEPS=(0.5, 1.0), COUNTED=True, PART=tl.bfloat16, MAX_STEPS=9,
    EARLY=2, REST=True, LISTS=2, UNIT=0.5,
)
types |= dict(count="*i32", parameter="*fp32", tolerance="fp32")
map_ = threshold_maps.MAPS["entmax"]
found = dict(WEIGHTS=map_.weights, NEWTON=map_.newton, START=map_.start, DEFORMED=True, PARAMETER=2)
compiles(decoding.store_logits, constants, types)
compiles(decoding.find_thresholds, constants | found, types, num_warps=16)
for statistic in range(4):
    compiles(decoding.soften_rows, constants | dict(STATISTIC=statistic, SELECTED=statistic < 2), types, num_warps=16)
compiles(decoding.sum_costs, constants, types)
for family in range(3):
    compiles(decoding.weigh_parts, constants | found | dict(FAMILY=family, RANGED=False, SPARSE=family > 0), types)
"""
    assert_compiles(script, lowered)
