"""The rival of bench_trainer.py: torchtitan's own trainer, driven by the least that makes it run on a CPU.

Device, attention, data and options are those of the npu-train run; everything else is torchtitan as it comes.
"""

import os
import sys

import torch
import torchtitan.tools.utils as utils

from npu_train.shims.cpu_device import CpuDevice


def main() -> None:
    # Before the other modules of torchtitan copy the two names.
    utils.device_type, utils.device_module = "cpu", CpuDevice("cpu")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    from npu_train.data import TextDataLoader
    from npu_train.recipe_configs import QUICKSTART_DATA

    init_logger()
    torch.compiler.set_stance("force_eager")
    config = ConfigManager().parse_args(sys.argv[1:])
    config.hf_assets_path = str(QUICKSTART_DATA / "tokenizer")
    config.dataloader = TextDataLoader.Config(dataset_path=str(QUICKSTART_DATA / "corpus.jsonl"))
    config.override.imports = ["npu_train.overrides.attention.masked_flex_attention"]
    trainer = config.build()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
