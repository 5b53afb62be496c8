"""A normalizer on some heads of a layer: weights, constants and errors."""

import pytest
import torch
from torch import nn

from attnorm.models.layer_normalizer import ByHead, check_fit, head_count, restrict_to_heads, validate_heads
from attnorm.normalizers import Normalizer, get
from attnorm.normalizers.contract import Map


class Holder(nn.Module):
    def __init__(self, **attributes: object) -> None:
        super().__init__()
        self.config = nn.Module()
        for name, value in attributes.items():
            setattr(self, name, value)


def normalizer(name: str, **options: object) -> Normalizer:
    found = get(name, **options)
    assert isinstance(found, Normalizer)
    return found


@pytest.mark.parametrize("heads", [(0,), (2,), (1, 3), (3, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("shape", [None, (3, 5), (4, 3, 5), (2, 1, 1, 5), (2, 4, 3, 5)])
def test_chosen_heads_have_the_normalizer_and_the_others_softmax(
    heads: tuple[int, ...], shape: tuple[int, ...] | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 4, 3, 5, generator=generator)
    mask = None if shape is None else torch.rand(shape, generator=generator) < 0.7
    found = Normalizer(ByHead(normalizer("sparsemax"), heads), name="x")(z, mask=mask)
    for head in range(4):
        own = "sparsemax" if head in heads else "softmax"
        torch.testing.assert_close(found[:, head], normalizer(own)(z, mask=mask)[:, head])


def test_a_mask_of_two_heads_is_taken_by_head() -> None:
    z, mask = torch.zeros(1, 2, 1, 3), torch.tensor([[[True, False, False]], [[False, True, True]]])
    found = Normalizer(ByHead(normalizer("sparsemax"), (1,)), name="x")(z, mask=mask)
    torch.testing.assert_close(found[0, :, 0], torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]))


def test_the_constant_is_the_larger_one_and_unknown_where_one_is() -> None:
    for n in (2, 5):
        bounds = normalizer("sigmoid").lipschitz(n), normalizer("sparsemax").lipschitz(n)
        assert bounds[0] != bounds[1]
        for one, other in (("sigmoid", "sparsemax"), ("sparsemax", "sigmoid")):
            assert ByHead(normalizer(one), (0,), normalizer(other)).lipschitz(n) == max(bounds)  # type: ignore[type-var]
    for one, other in (("stick_breaking", "softmax"), ("softmax", "stick_breaking")):
        assert ByHead(normalizer(one), (0,), normalizer(other)).lipschitz(3) is None
    assert "heads=(2, 0)" in repr(ByHead(normalizer("sigmoid"), (2, 0)))


def test_all_heads_take_the_normalizer_itself() -> None:
    one = normalizer("sigmoid")
    assert restrict_to_heads(one, None) is one
    assert isinstance(restrict_to_heads(one, (1,)).map, ByHead)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="'gaussian'"):
        restrict_to_heads(get("gaussian"), (1,))
    assert restrict_to_heads(get("gaussian"), None).name == "gaussian"


@pytest.mark.parametrize("name", ["num_heads", "num_attention_heads", "n_heads", "n_head"])
def test_the_number_of_heads_is_read_from_the_module_or_its_configuration(name: str) -> None:
    assert head_count(Holder(**{name: 3})) == 3
    module = Holder()
    setattr(module.config, name, 5)
    assert head_count(module) == 5
    found = head_count(Holder(q_proj=nn.Linear(8, 12), head_dim=4))
    assert found == 3
    assert isinstance(found, int)
    with pytest.raises(ValueError, match="Holder"):
        head_count(Holder(q_proj=nn.Linear(8, 12)))
    with pytest.raises(ValueError, match="Holder"):
        head_count(Holder(q_proj=nn.Identity(), head_dim=4))


@pytest.mark.parametrize("heads", [0, 3, [0, 3], (2,), range(4)])
def test_indices_of_heads(heads: object) -> None:
    expected = (heads,) if isinstance(heads, int) else tuple(heads)  # type: ignore[arg-type]
    assert validate_heads(heads, Holder(num_heads=4), "layer") == expected


def test_parameters_must_fit_the_heads() -> None:
    check_fit(normalizer("ssmax", heads=4), Holder(num_heads=4), "layer")
    check_fit(normalizer("ssmax"), Holder(num_heads=4), "layer")
    check_fit(get("gaussian"), Holder(num_heads=4), "layer")
    with pytest.raises(ValueError, match="'ssmax' does not fit layer, which has 4 heads"):
        check_fit(normalizer("ssmax", heads=3), Holder(num_heads=4), "layer")
    assert isinstance(normalizer("softmax").map, Map)
