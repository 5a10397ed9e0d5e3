"""Finding the first tensor that is not finite. Each model produces it at a known place."""

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch", reason="install npu-debug[torch] to run the tensor tests")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from npu_debug.nonfinite import find_nonfinite  # noqa: E402


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def linear(size: int = 4) -> nn.Linear:
    layer = nn.Linear(size, size, bias=False)
    nn.init.eye_(layer.weight)
    return layer


def replay(model, x=None):
    x = torch.ones(2, 4) if x is None else x

    def run():
        loss = model(x).sum()
        loss.backward()
        return loss

    return run


def hooks(model) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()
    ) + sum(len(p._backward_hooks or ()) for p in model.parameters())


def test_everything_finite_and_no_hook_left():
    model = nn.Sequential(linear(), nn.ReLU(inplace=True), linear())
    assert find_nonfinite(model, replay(model)) is None
    assert hooks(model) == 0
    # The gradients are those of the replay: all inputs and weights are known.
    assert torch.equal(model[2].weight.grad, torch.full((4, 4), 2.0))


def test_parameter_comes_first():
    model = nn.Sequential(linear(), nn.BatchNorm1d(4), linear())
    model[1].running_var[1] = math.nan
    with torch.no_grad():
        model[2].weight[0, :2] = math.nan
        model[2].weight[1, 0] = -math.inf
    found = find_nonfinite(model, replay(model, torch.full((2, 4), math.nan)))
    assert (found.kind, found.module, found.class_name, found.tensor) == ("parameter", "2", "Linear", "weight")
    assert (found.shape, found.dtype, found.nan, found.inf, found.numel) == ((4, 4), "torch.float32", 2, 1, 16)
    assert str(found) == (
        "The first tensor that is not finite is the parameter 'weight' of 2 (Linear), of shape (4, 4) and "
        "torch.float32, with 2 NaN and 1 Inf among 16 elements."
    )


def test_buffer_but_not_a_mask():
    model = nn.Sequential(linear(), nn.BatchNorm1d(4).eval())
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    assert find_nonfinite(model, replay(model)) is None
    model[1].running_mean[0] = math.inf
    found = find_nonfinite(model, replay(model))
    assert (found.kind, found.module, found.tensor, found.inf) == ("buffer", "1", "running_mean", 1)


def test_input_of_the_model():
    model = nn.Sequential(linear())
    x = torch.ones(2, 4)
    x[0, 1] = math.nan
    found = find_nonfinite(model, replay(model, x))
    assert (found.kind, found.module, found.class_name, found.tensor) == ("input", "", "Sequential", "input")
    assert "the model (Sequential)" in str(found)


def test_keyword_input_of_the_model():
    model = Apply(lambda *, x, mask: torch.nan_to_num(x))
    mask = torch.full((2,), -math.inf)
    found = find_nonfinite(model, lambda: model(mask=mask, x=torch.tensor([1.0, math.inf])))
    assert (found.kind, found.tensor, found.inf) == ("input", "input['x']", 1)
    assert find_nonfinite(model, lambda: model(mask=mask, x=torch.ones(2))) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_innermost_module_is_reported_before_its_parents(bad):
    block = nn.Sequential(linear(), Apply(lambda x: x * bad), linear())
    model = nn.Sequential(linear(), nn.Sequential(block), linear())
    found = find_nonfinite(model, replay(model))
    assert (found.kind, found.module, found.class_name, found.tensor) == ("output", "1.0.1", "Apply", "output")
    assert (found.nan, found.inf) == ((8, 0) if math.isnan(bad) else (0, 8))


def test_value_made_by_code_between_modules_is_blamed_on_the_module_around_it():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x):
            return self.second(self.first(x) / 0)

    model = nn.Sequential(linear(), Block(), linear())
    found = find_nonfinite(model, replay(model))
    assert (found.kind, found.module, found.class_name) == ("output", "1", "Block")
    assert found.note == "it arose in the module's own code, before it called 1.second"


def test_value_that_disappears_again_is_reported_as_the_input_it_was():
    inner = linear()
    model = Apply(lambda x: torch.nan_to_num(inner(x / 0), 0.0, 0.0))
    model.inner = inner
    found = find_nonfinite(model, replay(model))
    assert (found.kind, found.module, found.inf) == ("input", "inner", 8)


def test_gradient_names_the_module_whose_backward_made_it():
    # The derivative of sqrt at 0 is infinite, while its value is 0.
    model = nn.Sequential(linear(), Apply(torch.sqrt), linear())
    found = find_nonfinite(model, replay(model, torch.zeros(2, 4)))
    assert (found.kind, found.module, found.tensor) == ("gradient", "0", "grad of output")
    assert (found.nan, found.inf) == (0, 8)
    assert found.note == "it comes from the backward of 1"


def test_gradient_of_a_parameter_alone():
    # d(scale * x) / d(scale) = x: 1000 * 60000 exceeds the largest float16, 65504.
    scale = nn.Parameter(torch.ones((), dtype=torch.float16))
    model = Apply(lambda x: x * scale)
    model.scale = scale
    x = torch.full((1,), 60000.0, dtype=torch.float16)
    found = find_nonfinite(model, lambda: model(x).backward(torch.full((1,), 1000.0, dtype=torch.float16)))
    assert (found.kind, found.module, found.tensor, found.inf) == ("gradient", "", "grad of scale", 1)


def test_old_gradients_do_not_matter():
    model = nn.Sequential(linear())
    model[0].weight.grad = torch.full((4, 4), math.nan)
    assert find_nonfinite(model, replay(model)) is None
    assert torch.isfinite(model[0].weight.grad).all()


def test_gradient_that_only_the_parameter_holds_afterwards():
    model = nn.Sequential(linear())

    def run():
        replay(model)()
        model[0].weight.grad[0, 0] = math.nan  # as a reduction over ranks would leave it

    found = find_nonfinite(model, run)
    assert (found.kind, found.module, found.tensor, found.nan) == ("gradient", "0", "grad of weight", 1)


@pytest.mark.parametrize("as_number", [False, True])
def test_loss_function_outside_of_the_model(as_number):
    model = nn.Sequential(linear())

    def run():
        loss = (model(torch.ones(2, 4)).sum() - 8).log()
        loss.backward()
        return loss.item() if as_number else {"loss": loss}

    found = find_nonfinite(model, run)
    assert (found.kind, found.inf, found.numel) == ("loss", 1, 1)
    assert "of the replay" in str(found)


@dataclasses.dataclass
class Output:
    logits: object
    cache: object = None
    count: int = 3


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda x: (x, None, 3), "output[0]"),
        (lambda x: [None, {"y": x}], "output[1]['y']"),
        (lambda x: {"logits": x, "n": 1}, "output['logits']"),
        (lambda x: Output(x), "output.logits"),
        (lambda x: Output(None, (x,)), "output.cache"),
    ],
)
def test_outputs_of_any_kind(wrap, path):
    model = nn.Module()
    model.inner = Apply(lambda x: wrap(x * math.inf))
    model.forward = lambda x: model.inner(x) and x
    x = torch.ones(2, requires_grad=True)
    found = find_nonfinite(model, lambda: model(x).sum().backward())
    assert (found.kind, found.module, found.tensor) == ("output", "inner", path)


@pytest.mark.parametrize("value", [None, 3, "text", 2.5, (), Output(None), object(), Output])
def test_outputs_without_tensors(value):
    model = nn.Module()
    model.inner = Apply(lambda *args, **kwargs: value)
    model.forward = lambda x: [model.inner(x, 3, flag=None, data={"a": (x,)}), x * 2][1]
    assert find_nonfinite(model, replay(model, torch.ones(3, requires_grad=True))) is None


def test_output_that_contains_itself():
    loop: list = []
    loop.append(loop)
    model = Apply(lambda: loop)
    assert find_nonfinite(model, model) is None


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_dtypes(dtype):
    value = torch.tensor([1.0, math.nan, 2.0]).to(dtype)
    model = nn.Module()
    model.register_buffer("b", value)
    found = find_nonfinite(model, lambda: None)
    assert (found.dtype, found.nan, found.inf, found.shape) == (str(dtype), 1, 0, (3,))


def test_tensors_that_cannot_be_not_finite():
    model = nn.Module()
    for name, buffer in {
        "empty": torch.empty(0, 3),
        "integer": torch.ones(2, dtype=torch.int64),
        "boolean": torch.ones((), dtype=torch.bool),
        "meta": torch.empty(3, device="meta"),
        "scalar": torch.ones(()),
    }.items():
        model.register_buffer(name, buffer)
    assert find_nonfinite(model, lambda: None) is None


def test_large_tensors_are_counted_in_pieces(monkeypatch):
    monkeypatch.setattr("npu_debug.nonfinite._CHUNK", 7)
    model = nn.Module()
    value = torch.zeros(5, 3, 2)
    value[0, 0, 0] = value[4, 2, 1] = math.nan
    value[2] = math.inf
    model.register_buffer("b", value)
    found = find_nonfinite(model, lambda: None)
    assert (found.nan, found.inf, found.numel) == (2, 6, 30)


@pytest.mark.parametrize("spoiled", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_keeps_the_order(reentrant, spoiled):
    calls: list[int] = []

    def spoil(x):
        calls.append(1)
        return x * math.nan if len(calls) == spoiled else x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.block = linear(), nn.Sequential(linear(), Apply(spoil), linear())

        def forward(self, x):
            return checkpoint(self.block, self.head(x), use_reentrant=reentrant)

    model = Model()
    found = find_nonfinite(model, replay(model))
    assert len(calls) == 2  # the forward pass and its recomputation
    # The output of the recomputation is not searched; the gradients that it spoils are.
    assert found.kind == ("output" if spoiled == 1 else "gradient")
    assert spoiled == 2 or found.module == "block.1"
    assert hooks(model) == 0


def test_selective_checkpointing_of_an_operator_that_the_search_uses():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    saved = {
        torch.ops.aten.mm.default,
        torch.ops.aten.sum.default,
        torch.ops.aten.eq.Scalar,
        torch.ops.aten.stack.default,
    }

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    block = nn.Sequential(
        linear(), Apply(lambda x: x * x.eq(3.0).sum()), linear(), Apply(lambda x: x * x.eq(2.0).sum())
    )

    def forward(x):
        return checkpoint(
            block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )

    model = Apply(forward)
    model.block = block
    x = torch.tensor([[1.0, 2.0, 3.0, 3.0]])
    replay(model, x)()
    expected = [p.grad.clone() for p in model.parameters()]
    # A saved result that was taken for another would change the gradients.
    assert find_nonfinite(model, replay(model, x)) is None
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_names_of_wrappers_are_left_out():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    block = nn.Sequential(linear(), Apply(lambda x: x * math.inf))
    model = nn.ModuleDict({"layers": nn.Sequential(linear(), checkpoint_wrapper(block))})
    model.forward = lambda x: model["layers"](x)
    found = find_nonfinite(model, replay(model))
    assert (found.module, found.class_name) == ("layers.1.1", "Apply")


# torch's own compiler looks at the gradient of a tensor that is no leaf.
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor:UserWarning")
def test_compiled_modules_are_searched():
    block = nn.Sequential(linear(), Apply(lambda x: x * 1e30 * 1e30))
    model = nn.Sequential(linear(), block)
    block.compile(backend="eager")
    replay(model)()
    found = find_nonfinite(model, replay(model))
    assert (found.kind, found.module) == ("output", "1.1")
    wrapped = torch.compile(nn.Sequential(linear(), Apply(lambda x: x * 1e30 * 1e30)), backend="eager")
    replay(wrapped)()
    assert find_nonfinite(wrapped, replay(wrapped)).module == "1"


def test_model_parts():
    parts = [nn.Sequential(linear()), nn.Sequential(linear(), Apply(lambda x: x / 0))]
    found = find_nonfinite(parts, lambda: parts[1](parts[0](torch.ones(2, 4))).sum().backward())
    assert (found.kind, found.module, found.part) == ("output", "1", 1)
    assert "of model part 1" in str(found)
    assert find_nonfinite(parts[1:], lambda: parts[1](torch.ones(2, 4))).part is None


def test_first_microbatch_counts():
    model = nn.Sequential(linear(), Apply(lambda x: x.log()))

    def run():
        for value in (1.0, -1.0, 0.0):
            model(torch.full((2, 4), value)).sum().backward()

    found = find_nonfinite(model, run)
    assert (found.kind, found.module, found.nan, found.inf) == ("output", "1", 8, 0)


def test_error_in_the_replay():
    model = nn.Sequential(linear())

    def fails():
        raise ValueError("broken data")

    with pytest.raises(ValueError, match="broken data"):
        find_nonfinite(model, fails)
    assert hooks(model) == 0

    bad = nn.Sequential(linear(), Apply(lambda x: x / 0))

    def stops():
        bad(torch.ones(2, 4))
        raise RuntimeError("Loss is not finite")

    assert find_nonfinite(bad, stops).module == "1"


def test_replay_always_runs_so_that_ranks_stay_in_step():
    model = nn.Sequential(linear())
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    calls = []
    assert find_nonfinite(model, lambda: calls.append(1)).kind == "parameter"
    assert calls == [1]


@pytest.fixture
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fully_sharded_parameters(one_rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(linear(), Apply(torch.sqrt), linear())
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    assert isinstance(model[0].weight, DTensor)
    assert find_nonfinite(model, replay(model)) is None
    found = find_nonfinite(model, replay(model, torch.zeros(2, 4)))
    assert (found.kind, found.module, found.tensor) == ("gradient", "0", "grad of output")
    with torch.no_grad():
        model[2].weight.to_local()[1] = math.nan
    found = find_nonfinite(model, replay(model))
    assert (found.kind, found.module, found.shape, found.nan) == ("parameter", "2", (4, 4), 4)


def test_local_shard_is_counted_without_collectives(one_rank):
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (1,))
    value = torch.tensor([[1.0, math.nan], [math.inf, 2.0]])
    model = nn.Module()
    # A shape larger than the local shard, as another rank's rows would make it.
    model.weight = nn.Parameter(DTensor.from_local(value, mesh, [Shard(0)], shape=torch.Size([4, 2]), stride=(2, 1)))
    with CommDebugMode() as comm:
        found = find_nonfinite(model, lambda: None)
    assert comm.get_total_counts() == 0
    assert (found.shape, found.nan, found.inf, found.numel) == ((4, 2), 1, 1, 4)
