"""Parameter values that do not depend on how the parameters are sharded."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate


def layout_independent_init(init_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a parameter initialiser so that a sharded parameter gets the values of a run on one rank.

    Without a DTensor random-number tracker (there is none for CPU meshes) each rank fills its own shard from the same
    seed: the shards are then copies of each other, and the values depend on the layout. The wrapped initialiser fills a
    replicated tensor of the full size on every rank, and each rank keeps its own shard of it, without communication.
    Each rank draws the numbers of the full parameter, so that the generators stay equal over ranks and layouts.

    The ranks must hold the same random state beforehand. Memory: one full parameter at a time.

    Args:
        init_fn: ``init_fn(tensor, *args, **kwargs)`` that fills ``tensor`` in place, such as the functions of
            ``torch.nn.init``. Where the parameter is a DTensor it is handed another DTensor, with ``Replicate``
            placements and filled with NaN: it must set every element and cannot read the parameter's former values.

    Returns:
        A function with the signature of ``init_fn``. It returns what ``init_fn`` does, and the parameter where that is
        the tensor ``init_fn`` was handed. For tensors that are not DTensors it is ``init_fn``.

    Raises:
        ValueError: On the call: the parameter has a Partial placement, for which the parts are not determined.
    """

    @functools.wraps(init_fn)
    def init(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return init_fn(tensor, *args, **kwargs)
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(
                f"The parameter of shape {tuple(tensor.shape)} has placements {tensor.placements}; a Partial placement "
                "has no determined parts to initialise: use Shard or Replicate."
            )
        mesh = tensor.device_mesh
        # A DTensor, not its local tensor, because initialisers may treat DTensors differently (torchtitan's fused
        # qkv initialiser takes a plain tensor for a shard).
        unset = math.nan if tensor.is_floating_point() else 0
        full = DTensor.from_local(
            torch.full(tensor.shape, unset, dtype=tensor.dtype, device=tensor.device),
            mesh,
            [Replicate()] * mesh.ndim,
            run_check=False,
        )
        with torch.no_grad():
            with warnings.catch_warnings():
                # Said of shards; a replicated tensor is filled as a plain one.
                warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
                result = init_fn(full, *args, **kwargs)
            tensor.to_local().copy_(full.redistribute(mesh, tensor.placements).to_local())
        return tensor if result is full else result

    return init
