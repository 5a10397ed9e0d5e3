"""Meets the end of a device's memory, goes on, and waits to be ended."""

import time

import torch

print("devices", torch.npu.device_count(), torch.npu.get_device_name(0), flush=True)
free, total = torch.npu.mem_get_info()
print("memory", total, flush=True)
kept = torch.ones(100 * 2**20 // 4, device="npu")
try:
    torch.empty(200 * 2**20, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError as error:
    print("caught", str(error).splitlines()[0], flush=True)
del kept
torch.npu.empty_cache()
fits = torch.ones(200 * 2**20 // 4, device="npu")
print("sum", fits.sum().item(), flush=True)
print("ready", flush=True)
while True:
    fits.add_(1)
    torch.npu.synchronize()
    time.sleep(0.05)
