"""Kernels that are launched many times: which launches share a compiled kernel, and where numbers of rows come from."""

import copy
import importlib
import inspect
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines.execution import KnownCalls, known_calls
from attnorm.engines.inputs import Inputs, validate_inputs
from attnorm.kernels.launch import LAUNCHERS, KernelConstants, LaunchPlan, PreparedKernels, kinds_of, layout_of
from attnorm.kernels.linear_algebra import length_powers
from attnorm.kernels.one_pass import device_of_all
from attnorm.normalizers.asentmax import AdaptiveLengthScale
from attnorm.normalizers.entmax import Entmax
from attnorm.normalizers.softmax import Temperature
from tests.attention.kernel_calls import DEVICE, draw

BYTES = torch.zeros(128, dtype=torch.uint8)
# Integers around every limit, and tensors of several dtypes and alignments.
NUMBERS: list[Any] = [
    *(sign * 2**power + step for sign in (-1, 1) for power in (0, 1, 4, 5, 31, 32, 62) for step in (-1, 0, 1)),
    *(0, 0.0, 1.0, 0.25),
]
SOURCES: list[Any] = [
    *(BYTES[start : start + 32].view(dtype) for start in (0, 8, 16, 24) for dtype in (torch.float16, torch.float32)),
    *(0.0, 1.0, 0.25),
]


def test_arguments_of_one_kind_are_the_same_to_triton() -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    calls = [((source,), ()) for source in SOURCES] + [((), (number,)) for number in NUMBERS]
    of_kind: dict[object, set[object]] = {}
    for sources, numbers in calls:
        to_triton = native_specialize_impl(type(backend), (*sources, *numbers)[0], False, True, True)
        of_kind.setdefault(kinds_of(sources, numbers), set()).add(to_triton)
    assert all(len(kernels) == 1 for kernels in of_kind.values()), of_kind
    assert len(of_kind) < len(calls) / 2, "too many kinds: hardly any launch would be one of a known kind"


class Compiled:
    """Stands for a kernel that Triton has compiled for one device."""

    packed_metadata = ("warps",)

    def __init__(self, name: str, launches: list[Any]) -> None:
        self.function, self.launches = name, launches

    def run(self, gridX: int, gridY: int, gridZ: int, stream: int, function: str, *args: Any) -> None:
        self.launches.append((function, (gridX, gridY, gridZ), stream, args))


class OtherLauncher(Compiled):
    def run(self, gridX: int, gridY: int, gridZ: int, stream: int, function: str, cluster: int, *args: Any) -> None:
        raise AssertionError("called with the arguments of another launcher")


class Kernel:
    """Stands for a jitted function: records launches, and returns a compiled kernel."""

    def __init__(self, names: str, launches: list[Any], compiled: Any) -> None:
        self.arg_names, self.launches, self.compiled = names.split(), launches, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.launches.append(("triton", grid, arguments, constants))
            return self.compiled

        return launch


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The current stream of each device, in place of Triton's driver; a CPU has the number -1."""
    from triton.runtime import driver

    streams = {-1: 11}
    monkeypatch.setattr(type(driver), "active", SimpleNamespace(get_current_stream=streams.__getitem__))
    return streams


def prepared(launches: list[Any], compiled: type[Compiled] = Compiled) -> PreparedKernels:
    first = Kernel("x n SECOND FIRST", launches, compiled("first", launches))
    last = Kernel("y x m n FIRST", launches, compiled("last", launches))
    return PreparedKernels(
        ("x", "y", "m", "n"),
        KernelConstants(first, {"FIRST": 1, "SECOND": 2}, 4),
        KernelConstants(last, {"FIRST": 3}, 8),
    )


def launch(kernels: PreparedKernels, programs: tuple[int, int], sources: tuple[Any, ...], *numbers: int) -> LaunchPlan:
    """Launch once by a new plan, as a call of other shapes has."""
    plan = LaunchPlan(kernels, -1, programs, numbers)
    plan.launch(sources)
    return plan


def test_launches_of_a_known_kind_take_the_compiled_kernels(streams: dict[int, int]) -> None:
    launches: list[Any] = []
    kernels, x = prepared(launches), torch.zeros(8)
    plan = launch(kernels, (5, 6), (x, 0.5), 16, 3)
    options = {"num_warps": 4, "num_stages": 3}
    assert launches == [
        ("triton", (5,), (x, 3), {"FIRST": 1, "SECOND": 2, **options}),
        ("triton", (6,), (0.5, x, 16, 3), {"FIRST": 3, **options, "num_warps": 8}),
    ]
    launches.clear()
    streams[-1] = 13
    launch(kernels, (7, 8), (x, 0.25), 32, 5)
    assert launches == [
        ("first", (7, 1, 1), 13, (("warps",), None, None, None, x.data_ptr(), 5, 2, 1)),
        ("last", (8, 1, 1), 13, (("warps",), None, None, None, 0.25, x.data_ptr(), 32, 5, 3)),
    ]
    for address, by in ((x[4:], "last"), (x[1:], "triton"), (x[5:], "last"), (x, "last")):  # 16, 4, 20 and 0 bytes on
        plan.launch((address, 0.75))
        assert launches[-1][0] == by
        if by == "last":
            assert launches[-1][-1][4:] == (0.75, address.data_ptr(), 16, 3, 3)


def test_a_kernel_gets_the_first_source_in_place_of_an_absent_one(streams: dict[int, int]) -> None:
    launches: list[Any] = []
    kernel = Kernel("y z x n", launches, Compiled("only", launches))
    kernels = PreparedKernels(("x", "y", "z", "n"), KernelConstants(kernel, {}, 4), absent=["y"])
    x, z = torch.zeros(8), torch.zeros(8)
    LaunchPlan(kernels, -1, (1,), (3,)).launch((x, z))
    assert [argument is expected for argument, expected in zip(launches[0][2], (x, z, x, 3), strict=True)] == [True] * 4


@pytest.mark.parametrize("change", ["n = 1", "n = 16", "n = 2**31", "x = x.double()", "x = x[1:]", "y = x"])
def test_another_kind_of_an_argument_is_another_kernel(streams: dict[int, int], change: str) -> None:
    launches: list[Any] = []
    kernels = prepared(launches)
    values: dict[str, Any] = {"x": torch.zeros(8), "y": 0.5, "n": 3}
    for _ in range(2):
        launch(kernels, (5, 6), (values["x"], values["y"]), 16, values["n"])
        exec(change, {}, values)
    assert [name for name, *_ in launches] == ["triton"] * 4


def test_the_launcher_of_the_installed_triton_is_known() -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    assert " ".join(list(inspect.signature(CudaLauncher.__call__).parameters)[1:]) in LAUNCHERS


def test_triton_launches_where_its_launcher_is_another(streams: dict[int, int]) -> None:
    launches: list[Any] = []
    plan = launch(prepared(launches, OtherLauncher), (5, 6), (torch.zeros(8), 0.5), 16, 3)
    plan.launch((torch.zeros(8), 0.5))
    assert [name for name, *_ in launches] == ["triton"] * 4


def test_triton_launches_while_a_profiler_watches(streams: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    launches: list[Any] = []
    plan, x = LaunchPlan(prepared(launches), -1, (5, 6), (16, 3)), torch.zeros(8)

    def launched_by() -> str:
        plan.launch((x, 0.5))
        return str(launches[-1][0])

    assert [launched_by(), launched_by()] == ["triton", "last"]
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(knobs.runtime, name)
        monkeypatch.setattr(chain, "calls", [print])
        assert launched_by() == "triton"
        monkeypatch.setattr(chain, "calls", [])
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, name, print)
            assert launched_by() == "triton"
        assert launched_by() == "last"


FAST = {"causal": True, "engine": "triton"}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the normalizers for which a call was more than a launch that is known."""
    module, names = importlib.import_module("attnorm.attention"), []
    attend = module._attend
    monkeypatch.setattr(
        module, "_attend", lambda inputs, chosen, engine: (names.append(chosen.name), attend(inputs, chosen, engine))[1]
    )
    known_calls.forget()
    return names


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ssmax", {"heads": 4}),
        ("ssmax", {}),
        ("relu", {"power": 2.0}),
        ("sigmoid", {"bias": -2.0}),
        ("kernel", {"function": "polynomial", "offset": 0.5}),
        ("sink", {"heads": 4}),
        ("sink", {}),
        ("alibi", {"heads": 4}),
        ("asentmax", {"heads": 4, "gamma": 0.7}),
        ("asentmax", {}),
        ("kneemax", {"share": 2.0, "temperature": 0.7, "learned": True}),
        ("entmax", {"alpha": 1.3}),
    ],
)
def test_numbers_of_rows_reach_the_kernels_as_they_are(name: str, options: dict[str, Any], computed: list[str]) -> None:
    """Per head, one for all, or computed from n: the same as with a mask that hides nothing, which counts keys.

    The call of a copy with other parameters is known, unless torch computes numbers from parameters.
    """
    q, k, v = (t.detach() for t in draw((1, 4, 2, 1, 300, 16, 16)))
    normalizer = attnorm.get(name, **options).to(DEVICE)
    everything = torch.ones(1, 1, 1, 300, dtype=torch.bool, device=DEVICE)
    with torch.no_grad():
        for parameter in normalizer.parameters():
            parameter += torch.linspace(0.1, 0.4, max(1, parameter.numel())).to(DEVICE).view(parameter.shape)
        found = attnorm.attention(q, k, v, normalizer, **FAST)
        counted = attnorm.attention(q, k, v, normalizer, mask=everything, **FAST)
        expected = attnorm.attention(q, k, v, normalizer, causal=True, engine="blocked")
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-6)
        torch.testing.assert_close(counted, expected, rtol=2e-4, atol=2e-6)
        for parameter in normalizer.parameters():
            parameter.data.mul_(1.5)
            other = copy.deepcopy(normalizer)
            changed = attnorm.attention(q, k, v, normalizer, causal=True, engine="blocked")
            computed.clear()
            torch.testing.assert_close(attnorm.attention(q, k, v, other, **FAST), changed, rtol=2e-4, atol=2e-6)
            assert computed == (["kneemax"] if name == "kneemax" else [])


CHANGES: dict[str, Any] = {
    "another attribute": lambda call: setattr(call["normalizer"].map, "alpha", 1.4),
    "another scale": lambda call: call.update(scale=0.1),
    "another engine": lambda call: call.update(engine="blocked"),
    "a mask": lambda call: call.update(mask=torch.arange(300, device=DEVICE) < 200),
    "positions": lambda call: call.update(positions=torch.tensor([300], device=DEVICE)),
    "fewer keys": lambda call: call.update({name: call[name][:, :, :280] for name in "kv"}),
    "other strides": lambda call: call.update(k=torch.cat([call["k"]] * 2, -1)[..., :16]),
    "keys in columns": lambda call: call.update(k=call["k"].mT.contiguous().mT),
    "another dtype": lambda call: call.update({name: call[name].half() for name in "qkv"}),
    "one more rule": lambda call: call["normalizer"].scale.append(Temperature(0.5)),
    "parameters of another shape": lambda call: setattr(
        call["normalizer"].scale[0], "raw_beta", torch.nn.Parameter(torch.tensor(0.3, device=DEVICE))
    ),
    "a class of another package": lambda call: setattr(call["normalizer"], "map", OtherEntmax(1.5)),
}


# The others are no calls of plain inputs on kernels, or have numbers from torch or parts that we do not know.
KNOWN_AFTERWARDS = (
    "another attribute", "another scale", "fewer keys", "other strides", "another dtype", "parameters of another shape",
)  # fmt: skip


class OtherEntmax(Entmax):
    """Not known to do what its attributes say."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_from_a_known_one_is_computed(change: str, computed: list[str]) -> None:
    q, k, v = (t.detach() for t in draw((1, 2, 1, 1, 300, 16, 16)))
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "causal": True, "engine": "triton"}
    call["normalizer"] = attnorm.get("asentmax", heads=2, gamma=0.7).to(DEVICE)
    with torch.no_grad():
        for _ in range(2):
            attnorm.attention(**call)
        assert computed == ["asentmax"]
        CHANGES[change](call)
        computed.clear()
        found = attnorm.attention(**call)
        assert computed == ["asentmax"]
        expected = attnorm.attention(**{**call, "engine": "blocked"})
        tolerance = 1e-3 if found.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(found, expected, rtol=20 * tolerance, atol=tolerance)
        computed.clear()
        assert torch.equal(attnorm.attention(**call), found)
        assert computed == ([] if change in KNOWN_AFTERWARDS else ["asentmax"])


def test_known_calls_of_one_normalizer_are_not_those_of_another(computed: list[str]) -> None:
    """With the same attributes and layouts: of other classes, and with a parameter or a buffer of the same name."""
    q, k, v = (t.detach() for t in draw((1, 2, 1, 1, 260, 16, 16)))
    names = ["softmax", "softpick", "sink", "softmax1"]
    with torch.no_grad():
        for name in names:
            found = attnorm.attention(q, k, v, name, **FAST)
            torch.testing.assert_close(
                found, attnorm.attention(q, k, v, attnorm.get(name).to(DEVICE), engine="blocked"), rtol=2e-4, atol=1e-5
            )
        assert computed == [name for name in names for _ in range(2)]
        with pytest.raises(ValueError, match="hard"):  # has no kernel, and no attributes, as softmax
            attnorm.attention(q, k, v, "hard", **FAST)


def test_a_known_call_is_not_repeated_with_gradients_or_where_more_was_done(computed: list[str]) -> None:
    q, k, v = (t.detach() for t in draw((1, 1, 1, 1, 260, 16, 16)))
    inputs, normalizer = (
        validate_inputs(q, k, v, mask=None, causal=False, scale=None, positions=None),
        attnorm.get("relu"),
    )
    run = importlib.import_module("attnorm.attention")._attend
    with torch.no_grad():
        output = attnorm.attention(q, k, v, normalizer, engine="triton")
        for _ in range(2):
            negated = known_calls.attend(inputs, normalizer, "-", lambda: -run(inputs, normalizer, "triton"))
            assert torch.equal(negated, -output)
    with pytest.raises(ValueError, match="with gradients"):
        attnorm.attention(q.requires_grad_(), k, v, normalizer, engine="triton")


def test_softmax_is_known_only_where_sdpa_does_not_compute_it(computed: list[str]) -> None:
    q, k, v = (t.detach() for t in draw((1, 1, 1, 1, 260, 16, 16)))
    plain = validate_inputs(q, k, v, mask=None, causal=False, scale=None, positions=None)
    normalizer, run = attnorm.get("softmax"), importlib.import_module("attnorm.attention")._attend
    with torch.no_grad():
        for inputs, times in ((replace(plain, softcap=2.0), 1), (plain, 2)):
            computed.clear()
            first, second = (
                known_calls.attend(inputs, normalizer, "auto", lambda inputs=inputs: run(inputs, normalizer, "triton"))
                for _ in range(2)
            )
            assert torch.equal(first, second)
            assert len(computed) == times


def test_a_known_call_knows_every_field_of_its_inputs() -> None:
    """One that is added belongs into the key, or into `may_be_known`."""
    assert " ".join(field.name for field in fields(Inputs)) == (
        "q_BHQD k_BGKD v_BGKE mask causal scale positions hidden_states softcap bias dropout"
    )


def test_a_call_whose_parts_share_a_parameter_is_not_taken_for_one_of_two(computed: list[str]) -> None:
    q, k, v = (t.detach() for t in draw((1, 2, 1, 1, 260, 16, 16)))
    shared, own = (attnorm.get("asentmax", heads=2, gamma=0.7).to(DEVICE) for _ in range(2))
    shared.scale[0].raw_gamma = shared.scale[0].raw_beta
    with torch.no_grad():
        for normalizer in (shared, shared, own, shared):
            found = attnorm.attention(q, k, v, normalizer, **FAST)
            expected = attnorm.attention(q, k, v, normalizer, causal=True, engine="blocked")
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-5)


def test_a_call_on_a_cpu_does_not_import_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.engines.execution.runs_triton", lambda device: pytest.fail("imports Triton"))
    q = torch.ones(1, 1, 1, 8)
    with torch.no_grad():
        assert torch.equal(attnorm.attention(q, q, q, "sparsemax"), q)


def test_kernels_get_no_addresses_of_two_devices() -> None:
    on_cpu = layout_of(torch.zeros(3))
    assert isinstance(on_cpu, tuple)
    assert device_of_all(on_cpu, None, float, on_cpu) == -1
    with pytest.raises(ValueError, match=r"\[-1, 0\]"):
        device_of_all(on_cpu, (*on_cpu[:3], 0))


def test_only_so_many_calls_are_kept(computed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownCalls, "LIMIT", 2)
    q, k, v = (t.detach() for t in draw((1, 1, 1, 1, 260, 16, 16)))
    with torch.no_grad():
        for keys in (258, 259, 258, 260, 258):
            attnorm.attention(q, k[:, :, :keys], v[:, :, :keys], "entmax15", engine="triton")
    assert len(computed) == 4  # 258 was kept once, and then forgotten with 259


def test_parameters_of_half_precision_and_of_other_strides() -> None:
    q, k, v = (t.detach() for t in draw((1, 4, 2, 1, 300, 16, 16)))
    normalizer = attnorm.get("ssmax", heads=4).to(DEVICE, torch.bfloat16)

    def both() -> list[Tensor]:
        return [attnorm.attention(q, k, v, normalizer, causal=True, engine=engine) for engine in ("triton", "blocked")]

    with torch.no_grad():
        torch.testing.assert_close(*both(), rtol=2e-4, atol=2e-6)
        normalizer.scale[0].s = torch.nn.Parameter(torch.rand(4, 2, device=DEVICE)[:, 1])
        torch.testing.assert_close(*both(), rtol=2e-4, atol=2e-6)
        with pytest.raises(ValueError, match="4"):
            attnorm.attention(q[:, :2], k, v, normalizer, causal=True, engine="triton")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_factors_of_asentmax_have_the_digits_of_float32(delta: float) -> None:
    """Of parameters so small or so large that softplus and tanh could lose digits too."""
    rule = AdaptiveLengthScale(delta, heads=7)
    rule.raw_beta.data = torch.tensor([-30.0, -9.0, -1.0, 0.0, 1.0, 9.0, 90.0])
    rule.raw_gamma.data = torch.tensor([0.0, 1e-3, -50.0, 0.5, 50.0, -0.5, 2.0])
    exact = rule.double().factor(torch.full((1, 1), 1000.0, dtype=torch.float64), None, None)[:, 0, 0]
    given = [p.detach().to(DEVICE, torch.float32) for p in (rule.raw_beta, rule.raw_gamma)]
    found = length_powers(*given, delta, [1, 7, 1], 1000, False)[0, :, 0]
    assert found.dtype == torch.float32
    tolerance = 1e-6 if DEVICE == "cpu" else 1e-5  # a GPU's exponential of -30 has fewer digits
    torch.testing.assert_close(found.double().cpu(), exact.detach(), rtol=tolerance, atol=0.0)
    normalizer = attnorm.compose("sigmoid", scale=rule.float())  # whose weights are functions of one logit each
    q, k = (torch.full((1, 7, keys, 16), 1e-3, device=DEVICE) for keys in (1, 1000))
    with torch.no_grad():
        decoded = attnorm.attention(q, k, k, normalizer.to(DEVICE), engine="triton")
        expected = attnorm.attention(q.double(), k.double(), k.double(), normalizer.double())
    torch.testing.assert_close(decoded.double(), expected, rtol=tolerance, atol=0.0)
