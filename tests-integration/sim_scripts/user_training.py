"""A small classifier, trained on NPUs by plain torch, alone or under torchrun. It knows nothing of simulators."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

STEPS = 6
CLASSES, WIDTH, ROWS = 4, 32, 64


def batches(device: torch.device, rank: int, ranks: int):
    """Batches of this rank, copied on a stream of their own while the previous one is worked on."""
    generator = torch.Generator().manual_seed(5)
    centres = torch.randn(CLASSES, WIDTH, generator=generator) * 2
    copies = torch.npu.Stream(device)
    for _ in range(STEPS):
        labels = torch.randint(CLASSES, (ROWS,), generator=generator)
        rows = centres[labels] + torch.randn(ROWS, WIDTH, generator=generator)
        with torch.npu.stream(copies):
            pinned = [part.chunk(ranks)[rank].contiguous().pin_memory() for part in (rows, labels)]
            moved = [part.to(device, non_blocking=True) for part in pinned]
            arrived = torch.npu.Event()
            arrived.record(copies)
        torch.npu.current_stream().wait_event(arrived)
        for part in moved:
            part.record_stream(torch.npu.current_stream())
        yield moved


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def main() -> None:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    assert torch.npu.is_available()
    assert torch.accelerator.current_accelerator().type == "npu"
    torch.npu.set_device(rank)
    device = torch.device("npu", torch.npu.current_device())
    if ranks > 1:
        dist.init_process_group("hccl", device_id=device)
    if rank == 0:
        print("devices", torch.npu.device_count(), torch.npu.get_device_name(device), flush=True)
    net = build().to(device)
    if ranks > 1:
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, reshard_after_forward=True)
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("npu", init_scale=1024.0)
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for step, (rows, labels) in enumerate(batches(device, rank, ranks), 1):
        with torch.autocast("npu", dtype=torch.float16):
            logits = net(rows)
            assert logits.dtype == torch.float16
            loss = nn.functional.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        total = loss.detach().float()
        if ranks > 1:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        if rank == 0:
            print("loss", step, total.item(), flush=True)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    assert torch.npu.memory_allocated() > 0
    assert torch.npu.max_memory_allocated() >= torch.npu.memory_allocated()

    file = sys.argv[1]
    state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"model": state, "scaler": scaler.state_dict()}, file)
        loaded = torch.load(file, map_location=device, weights_only=True)
        again = build().to(device)
        again.load_state_dict(loaded["model"])
        with torch.no_grad():
            accuracy = (again(rows).argmax(-1) == labels).float().mean().item()
        print("accuracy", accuracy, flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
