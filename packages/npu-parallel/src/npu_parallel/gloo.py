"""What gloo lacks for FSDP2 and expert parallelism, expressed with what it has."""

import functools
import types
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def force_sum_reduction(model: torch.nn.Module) -> int:
    """Make every FSDP module of a model reduce gradients with plain sums.

    FSDP2 with a gradient divide factor reduces with ``ReduceOp.PREMUL_SUM``, which gloo refuses ("Cannot use
    ReduceOp.PREMUL_SUM with Gloo"). Call this after the last ``fully_shard``.

    Args:
        model: A module; ``fully_shard`` may have been applied to it, to parts of it, or to none.

    Returns:
        The number of FSDP modules found.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_force_sum_reduction_for_comms(True)
    return len(modules)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> "dist.Work | _UnpackedWork | None":
    """``torch.distributed.all_to_all`` that also takes chunks of different shapes on gloo.

    gloo's own list all-to-all wants chunks of one shape. Here the chunks travel as bytes through
    ``all_to_all_single``: every dtype is carried, bool, complex and float8 included. Other backends get the call
    unchanged.

    Args:
        output_tensor_list: One tensor for each rank of the group, filled in place with what that rank sent.
        input_tensor_list: One tensor for each rank of the group, sent to it; any shapes, zero sizes included.
        group: The process group; None is the default one.
        async_op: Return at once.

    Returns:
        None; with ``async_op`` a work handle. The outputs are filled once its ``wait()`` has returned.

    Raises:
        ValueError: The lists do not have one tensor for each rank, or the tensors differ in dtype or device.
    """
    tensors = [*output_tensor_list, *input_tensor_list]
    if dist.get_rank(group) < 0 or not tensors or _backend_for(tensors[0].device, group) != "gloo":
        return dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)

    ranks = dist.get_world_size(group)
    if len(output_tensor_list) != ranks or len(input_tensor_list) != ranks:
        raise ValueError(
            f"all_to_all got {len(output_tensor_list)} outputs and {len(input_tensor_list)} inputs; "
            f"pass one of each for each of the {ranks} ranks of the group."
        )
    kinds = {(str(tensor.dtype), str(tensor.device)) for tensor in tensors}
    if len(kinds) > 1:
        raise ValueError(f"all_to_all got tensors of {sorted(kinds)}; all must have one dtype and one device.")

    sent = torch.cat([_bytes(tensor.detach()) for tensor in input_tensor_list])
    received = sent.new_empty(sum(tensor.nbytes for tensor in output_tensor_list))
    work = dist.all_to_all_single(
        received,
        sent,
        [tensor.nbytes for tensor in output_tensor_list],
        [tensor.nbytes for tensor in input_tensor_list],
        group=group,
        async_op=async_op,
    )
    if async_op:
        return _UnpackedWork(work, received, sent, output_tensor_list)
    _unpack(received, output_tensor_list)
    return None


@functools.cache
def dist_with_list_all_to_all() -> types.ModuleType:
    """A stand-in for the module ``torch.distributed`` whose ``all_to_all`` is the one above.

    Pass it to ``spmd_types._dist.set_dist``, the hook spmd_types has for this.

    Returns:
        A module; every other name is looked up in ``torch.distributed`` when it is used.
    """
    return _Dist("npu_parallel.gloo.dist", "torch.distributed, with a list all_to_all for gloo")


class _Dist(types.ModuleType):
    all_to_all = staticmethod(all_to_all)

    def __getattr__(self, name: str) -> object:
        return getattr(dist, name)

    def __dir__(self) -> list[str]:
        return dir(dist)


class _UnpackedWork:
    """A work handle that fills the outputs when it is waited for; other attributes are those of the handle it holds."""

    def __init__(
        self, work: dist.Work, received: torch.Tensor, sent: torch.Tensor, outputs: Sequence[torch.Tensor]
    ) -> None:
        self._work = work
        self._received: torch.Tensor | None = received
        # gloo reads the buffer until the operation is complete.
        self._sent: torch.Tensor | None = sent
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        if self._received is not None:
            _unpack(self._received, self._outputs)
            self._received = self._sent = None
        return done

    def __getattr__(self, name: str) -> object:
        return getattr(self._work, name)


def _backend_for(device: torch.device, group: dist.ProcessGroup | None) -> str | None:
    # "cpu:gloo,npu:hccl": a group may have one backend for each kind of device.
    pairs = (pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))
    return dict(pairs).get(device.type)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _unpack(received: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    parts = received.split([tensor.nbytes for tensor in outputs])
    with torch.no_grad():
        for output, part in zip(outputs, parts, strict=True):
            # A part may start at any byte, and a view as a wider dtype wants an aligned start.
            output.copy_(part.clone().view(output.dtype).view(output.shape))
