"""Random numbers on simulated devices: states, generators and distributions.

The device's generator is a seed and an offset, as on the real device, of 16 bytes; each draw moves the offset.
"""

import math
import struct
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="install npu-debug[sim] to run the tests on simulated devices")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.sim

DRAWS = {
    "rand": lambda: torch.rand(64, device="npu"),
    "randn": lambda: torch.randn(64, device="npu"),
    "randn in bfloat16": lambda: torch.randn(64, device="npu", dtype=torch.bfloat16),
    "complex randn": lambda: torch.randn(64, device="npu", dtype=torch.complex64),
    "randint": lambda: torch.randint(0, 1000, (64,), device="npu"),
    "randperm": lambda: torch.randperm(64, device="npu"),
    "rand_like": lambda: torch.rand_like(torch.ones(64, device="npu")),
    "uniform_": lambda: torch.empty(64, device="npu").uniform_(-1, 1),
    "normal": lambda: torch.normal(torch.zeros(64, device="npu"), 2.0),
    "normal_": lambda: torch.empty(64, device="npu").normal_(),
    "exponential_": lambda: torch.empty(64, device="npu").exponential_(),
    "random_": lambda: torch.empty(64, device="npu", dtype=torch.int64).random_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5, device="npu")),
    "multinomial": lambda: torch.multinomial(torch.ones(64, device="npu"), 64, replacement=True),
    "dropout": lambda: F.dropout(torch.ones(64, device="npu")),
    "dropout2d": lambda: F.dropout2d(torch.ones(4, 64, 1, 1, device="npu")),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(64, device="npu"), 0.5, True),
    "rrelu": lambda: F.rrelu(-torch.ones(64, device="npu"), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(16, 3, device="npu")),
    "dropout in attention": lambda: F.scaled_dot_product_attention(
        *[torch.arange(64.0, device="npu").view(1, 1, 8, 8).cos()] * 3, dropout_p=0.5
    ),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(64, device="npu")),
    "kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(8, 8, device="npu")),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(8, 8, device="npu")),
}


def offset() -> int:
    return torch.npu.default_generators[0].get_offset()


# torch_npu says so, on real devices too, of a tensor made with the format "legacy contiguous", as rrelu does.
@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning")
@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_fixes_what_is_drawn(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(1)
    host = torch.get_rng_state()
    first, second = draw(), draw()
    assert offset() > 0
    assert torch.get_rng_state().equal(host), "the host's generator was used"
    torch.manual_seed(1)
    again = draw()
    torch.manual_seed(2)
    other = draw()
    assert first.equal(again)
    assert not first.equal(second)
    assert not first.equal(other)


@pytest.mark.parametrize("name", ["rand", "multinomial", "dropout", "rrelu", "dropout in attention"])
def test_a_restored_state_repeats_the_draw(name: str) -> None:
    DRAWS[name]()
    state = torch.npu.get_rng_state()
    first = DRAWS[name]()
    DRAWS["randn"]()
    torch.npu.set_rng_state(state)
    assert DRAWS[name]().equal(first)


def test_the_state_is_a_seed_and_an_offset() -> None:
    """DTensor takes it apart (torch.distributed.tensor._random), so its form matters."""
    torch.npu.manual_seed(123)
    state = torch.npu.get_rng_state()
    assert (state.dtype, state.device.type, state.shape) == (torch.uint8, "cpu", (16,))
    assert struct.unpack("<qq", bytes(state.tolist())) == (123, 0)
    torch.rand(5, device="npu")
    # Offsets move in fours.
    assert struct.unpack("<qq", bytes(torch.npu.get_rng_state().tolist())) == (123, 8)


def test_a_state_put_together_by_hand_is_used_as_dtensor_does() -> None:
    torch.npu.manual_seed(9)
    torch.rand(100, device="npu")
    expected = torch.rand(5, device="npu")
    torch.npu.manual_seed(0)
    torch.npu.set_rng_state(torch.tensor(list(struct.pack("<qq", 9, 100)), dtype=torch.uint8))
    assert torch.rand(5, device="npu").equal(expected)


def test_what_does_not_draw_does_not_move_the_offset() -> None:
    torch.manual_seed(1)
    q = torch.ones(1, 2, 4, 8, device="npu")
    F.scaled_dot_product_attention(q, q, q)
    F.dropout(q, 0.5, training=False)
    nn.Dropout(0.5).to("npu").eval()(q)
    torch.zeros(3, device="npu")
    assert offset() == 0


def test_a_generator_of_ones_own() -> None:
    default = torch.npu.get_rng_state()
    generator = torch.Generator(device="npu")
    assert generator.device.type == "npu"
    generator.manual_seed(5)
    first = torch.rand(8, device="npu", generator=generator)
    state = generator.get_state()
    second = torch.rand(8, device="npu", generator=generator)
    generator.set_state(state)
    assert torch.rand(8, device="npu", generator=generator).equal(second)
    assert generator.initial_seed() == 5
    assert torch.rand(8, device="npu", generator=torch.Generator("npu").manual_seed(5)).equal(first)
    assert torch.npu.get_rng_state().equal(default)
    copied = torch.Generator(device="npu")
    copied.set_state(generator.get_state())
    assert torch.rand(8, device="npu", generator=copied).equal(torch.rand(8, device="npu", generator=generator))
    assert generator.seed() != 5


def test_a_generator_of_the_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        torch.rand(3, device="npu", generator=torch.Generator())


def test_fork_rng_puts_both_states_back() -> None:
    host, device = torch.get_rng_state(), torch.npu.get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        torch.manual_seed(3)
        inside = torch.rand(4, device="npu")
        torch.rand(4)
    assert torch.get_rng_state().equal(host)
    assert torch.npu.get_rng_state().equal(device)
    torch.manual_seed(3)
    assert torch.rand(4, device="npu").equal(inside)


def test_every_device_has_a_generator() -> None:
    torch.manual_seed(4)  # of all devices
    zero, one = torch.rand(8, device="npu:0"), torch.rand(8, device="npu:1")
    assert zero.cpu().equal(one.cpu())
    with torch.npu.device(1):
        torch.npu.manual_seed(5)
    assert torch.npu.initial_seed() == 4
    assert not torch.rand(8, device="npu:0").cpu().equal(torch.rand(8, device="npu:1").cpu())
    torch.npu.manual_seed_all(6)
    states = torch.npu.get_rng_state_all()
    assert len(states) == torch.npu.device_count()
    assert {struct.unpack("<q", bytes(s.tolist()[:8]))[0] for s in states} == {6}
    torch.npu.set_rng_state_all(states)


@pytest.mark.parametrize("seed", range(10))
def test_neighbouring_seeds_and_offsets_are_unrelated(seed: int) -> None:
    n = 4096
    torch.npu.manual_seed(seed)
    a, b = torch.randn(n, device="npu"), torch.randn(n, device="npu")
    torch.npu.manual_seed(seed + 1)
    c = torch.randn(n, device="npu")
    # Correlations of unrelated draws are normal with a deviation of 1 / 64: six of them.
    for x, y in ((a, b), (a, c), (b, c)):
        assert abs(torch.corrcoef(torch.stack([x, y]).cpu())[0, 1].item()) < 6 / math.sqrt(n)


# A sampler with its mean and deviation.
N = 20_000
DISTRIBUTIONS: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {
    "uniform": (lambda: torch.rand(N, device="npu"), 0.5, math.sqrt(1 / 12)),
    "uniform_": (lambda: torch.empty(N, device="npu").uniform_(2, 6), 4.0, 4 * math.sqrt(1 / 12)),
    "normal": (lambda: torch.randn(N, device="npu"), 0.0, 1.0),
    "normal_": (lambda: torch.empty(N, device="npu").normal_(3, 2), 3.0, 2.0),
    "randint": (lambda: torch.randint(0, 10, (N,), device="npu"), 4.5, math.sqrt(99 / 12)),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3, device="npu")), 0.3, math.sqrt(0.21)),
    "exponential": (lambda: torch.empty(N, device="npu").exponential_(2.0), 0.5, 0.5),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([1.0, 0.0, 3.0], device="npu"), N, replacement=True),
        1.5,
        math.sqrt(0.75),
    ),
    "dropout": (lambda: F.dropout(torch.ones(N, device="npu"), 0.2), 1.0, math.sqrt(0.2 / 0.8)),
    # By torch_npu's fall-back to the host.
    "poisson": (lambda: torch.poisson(torch.full((N,), 4.0, device="npu")), 4.0, 2.0),
    "gamma": (lambda: torch.distributions.Gamma(torch.tensor(2.0, device="npu"), 1.0).sample((N,)), 2.0, math.sqrt(2)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name: str) -> None:
    draw, mean, deviation = DISTRIBUTIONS[name]
    seed = torch.seed() % 2**32
    torch.manual_seed(seed)
    sample = draw().cpu().double()
    # Six deviations of the mean; the spread is within 10 %.
    assert abs(sample.mean().item() - mean) < 6 * deviation / math.sqrt(N), f"seed {seed}"
    assert sample.std().item() == pytest.approx(deviation, rel=0.1), f"seed {seed}"


def test_the_backward_of_dropout_uses_the_mask() -> None:
    x = torch.ones(1000, device="npu", requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert x.grad.equal(y.detach())
    assert sorted(set(y.tolist())) == pytest.approx([0.0, 4 / 3])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_at_its_ends(p: float) -> None:
    x = torch.ones(100, device="npu", requires_grad=True)
    y = F.dropout(x, p)
    y.sum().backward()
    assert y.sum().item() == x.grad.sum().item() == (100 if p == 0 else 0)


def test_randperm_is_a_permutation() -> None:
    assert torch.randperm(1000, device="npu").sort()[0].equal(torch.arange(1000, device="npu"))


def test_multinomial_without_replacement_draws_each_once() -> None:
    drawn = torch.multinomial(torch.ones(50, device="npu"), 50)
    assert sorted(drawn.tolist()) == list(range(50))
