"""Every bad configuration is told before anything starts, all at once, with exit code 2."""

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed
from tokenizers import Tokenizer

from npu_train import cli, configs
from npu_train.check import model_shape
from npu_train.recipes import RECIPES


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    # The run itself would be a failure of these tests.
    monkeypatch.setattr("npu_train.launch.torchrun", lambda *_: pytest.fail("torchrun was started"))


@pytest.fixture
def refused(in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: str) -> str:
        monkeypatch.setattr(
            "torchtitan.trainer.Trainer.__init__", lambda *_: pytest.fail("the trainer was built"), raising=True
        )
        code = cli.main(["run", *arguments, "--device", "cpu"])
        error = capsys.readouterr().err
        assert code == 2, error
        assert "Traceback" not in error
        assert not torch.distributed.is_initialized()
        return error

    return run


LLAMA = ["--module", "llama3", "--config", "llama3_debugmodel"]
MOE = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]

CASES = {
    "module": (["--module", "lama3", "--config", "x"], ["unknown module 'lama3'", "Near matches: llama3"]),
    "dotted module": (["--module", "no.such", "--config", "x"], ["'no.such'", "cannot be imported"]),
    "module with a missing package": (
        ["--module", "qwen3_5", "--config", "qwen35_debugmodel"],
        ["needs the package 'fla'", "pip install fla"],
    ),
    "config": (
        ["--module", "llama3", "--config", "llama3_debugmodle"],
        ["unknown configuration 'llama3_debugmodle'", "llama3_debugmodel"],
    ),
    "option": (["quickstart", "--training.step", "5"], ["--training.step", "Perhaps you meant: --training.steps"]),
    "value": (["quickstart", "--training.steps", "many"], ["--training.steps", "many"]),
    "tokenizer": (
        [*LLAMA, "--hf-assets-path", "./nowhere"],
        ["no tokenizer in nowhere", "tokenizer.json", "--hf-assets-path"],
    ),
    "data": (["quickstart", "--data", "gone.txt"], ["data file not found", "gone.txt"]),
    "sequence length for context parallelism": (
        [*LLAMA, "--nproc", "2", "--parallelism.context-parallel-degree", "2", "--training.seq-len", "300"],
        ["--training.seq-len", "300", "256", "512"],
    ),
    "sequence length for the chunked loss": (
        ["quickstart", "--training.seq-len", "100"],
        ["8 chunks", "Use a multiple of 8"],
    ),
    "sequence length beyond the positions": (["quickstart", "--training.seq-len", "8192"], ["positions end at 4096"]),
    "heads": (
        ["quickstart", "--nproc", "4", "--parallelism.tensor-parallel-degree", "4"],
        ["--parallelism.tensor-parallel-degree", "2"],
    ),
    "degrees": (
        [*LLAMA, "--nproc", "4", "--parallelism.data-parallel-shard-degree", "3"],
        ["4", "dp_shard"],
    ),
    "one process for two": ([*LLAMA, "--parallelism.tensor-parallel-degree", "2"], ["tp(2)", "with --nproc"]),
    "experts": (
        [*MOE, "--nproc", "3", "--parallelism.expert-parallel-degree", "3"],
        ["--parallelism.expert-parallel-degree", "8 experts"],
    ),
    "layers": (
        ["quickstart", "--nproc", "8", "--parallelism.pipeline-parallel-degree", "8"],
        ["--parallelism.pipeline-parallel-degree"],
    ),
    "global batch": (
        ["quickstart", "--nproc", "2", "--training.global-batch-size", "8"],
        ["--training.global-batch-size", "16"],
    ),
    "steps": (["quickstart", "--training.steps", "0"], ["--training.steps is 0"]),
    "chunks": (["quickstart", "--loss.num-chunks", "0"], ["--loss.num-chunks is 0"]),
    "no global batch": (["quickstart", "--training.global-batch-size", "0"], ["--training.global-batch-size is 0"]),
    "log frequency": (["quickstart", "--metrics.log-freq", "0"], ["--metrics.log-freq is 0"]),
    "validation frequency": (["quickstart", "--validator.freq", "0"], ["--validator.freq is 0"]),
    "validation data for one batch": (
        ["quickstart", "--validator.steps", "-1", "--training.local-batch-size", "512"],
        ["validation: ", "do not fill a batch of 512 rows"],
    ),
    "what to exclude": (["quickstart", "--checkpoint.exclude-from-loading", "optimiser"], ["no part 'optimiser'"]),
    "seed checkpoint without checkpoints": (
        [*LLAMA, "--checkpoint.create-seed-checkpoint"],
        ["--checkpoint.create-seed-checkpoint needs checkpoints"],
    ),
    "seed checkpoint of several processes": (
        ["quickstart", "--nproc", "2", "--training.local-batch-size", "4", "--checkpoint.create-seed-checkpoint"],
        ["Run it with --nproc 1"],
    ),
    "data for another kind of training": (
        ["--module", "llama3", "--config", "sft_debugmodel", "--data", "x.txt"],
        ["--data is for training on plain text", "ChatDataLoader"],
    ),
    "no such checkpoint": (
        ["quickstart", "--checkpoint.load-step", "7"],
        ["no checkpoint of step 7", "Whole ones there: none"],
    ),
    "no initial checkpoint": (
        ["quickstart", "--checkpoint.initial-load-path", "/no/such/step-0"],
        ["there is no folder /no/such/step-0"],
    ),
    "checkpoints off": ([*LLAMA, "--resume"], ["--resume needs checkpoints", "Add --checkpoint.enable"]),
    "output folder": (
        ["quickstart", "--dump-folder", "/proc/x"],
        ["output folder /proc/x", "--dump-folder"],
    ),
    "override": (["quickstart", "--override.imports", "no.such.thing"], ["--override.imports", "no.such"]),
    "cpu offload": (["quickstart", "--training.enable-cpu-offload"], ["on the CPU", "enable-cpu-offload"]),
    "pinned memory": (
        ["quickstart", "--checkpoint.async-mode", "async_with_pinned_mem"],
        ["on the CPU", "Use async or disabled"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_configurations(refused, case: str) -> None:
    arguments, messages = CASES[case]
    error = refused(*arguments)
    for message in messages:
        assert message in error


def test_every_problem_is_in_one_answer(refused, in_tmp: Path) -> None:
    (in_tmp / "file").write_text("")
    error = refused(
        "quickstart",
        "--nproc",
        "4",
        "--parallelism.tensor-parallel-degree",
        "4",
        "--data",
        "gone.txt",
        "--dump-folder",
        "file/run",
        "--training.enable-cpu-offload",
    )
    # Neither the 6 query heads nor the 2 key/value heads can be split in 4.
    assert "5 problems; nothing was started" in error
    for message in ("tensor-parallel-degree", "gone.txt", "file is a file", "enable-cpu-offload"):
        assert message in error


def test_a_tokenizer_larger_than_the_vocabulary(refused, in_tmp: Path) -> None:
    folder = in_tmp / "tokenizer"
    shutil.copytree(str(configs.QUICKSTART_DATA / "tokenizer"), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["oneword", "another"])
    tokenizer.save(str(folder / "tokenizer.json"))
    error = refused("quickstart", "--hf-assets-path", str(folder))
    assert "has 2050 entries, the model's vocabulary only 2048" in error


def test_a_damaged_tokenizer(refused, in_tmp: Path) -> None:
    (in_tmp / "tokenizer.json").write_text('{"version": "1.0", "model"')
    assert "cannot be read" in refused("quickstart", "--hf-assets-path", ".")


def test_empty_data(refused, in_tmp: Path) -> None:
    (in_tmp / "empty.txt").write_text("\n")
    assert "is empty" in refused("quickstart", "--data", "empty.txt")


def test_a_checkpoint_cut_short(refused, in_tmp: Path) -> None:
    """Written by torch, as a run would leave it."""
    import torch.distributed.checkpoint as dcp

    for step in (5, 10):
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.save({"w": torch.ones(1000)}, checkpoint_id=f"run/checkpoint/step-{step}", no_dist=True)
    (file,) = Path("run/checkpoint/step-10").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    for arguments in ([], ["--resume"], ["--checkpoint.load-step", "10"]):
        error = refused("quickstart", "--dump-folder", "run", *arguments)
        assert "step-10" in error
        assert "is cut short (100 of at least" in error
        assert "Whole ones there: 5" in error


def _save(state: dict, path: str) -> None:
    import torch.distributed.checkpoint as dcp

    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=path, no_dist=True)


def test_weights_alone_cannot_be_continued(refused) -> None:
    _save({"w": torch.ones(10)}, "run/checkpoint/step-10")
    error = refused("quickstart", "--dump-folder", "run", "--resume")
    assert "holds only weights" in error
    assert "--checkpoint.initial-load-path" in error


def test_a_folder_that_torchtitan_would_mistake_for_a_checkpoint(refused) -> None:
    _save({"w": torch.ones(10), "train_state": {"step": torch.tensor(5)}}, "run/checkpoint/step-5")
    Path("run/checkpoint/step-10.damaged").mkdir()
    assert "step-10.damaged looks like a checkpoint to torchtitan" in refused("quickstart", "--dump-folder", "run")


def test_an_unfinished_checkpoint_does_not_hide_a_missing_initial_one(refused) -> None:
    Path("run/checkpoint/step-10").mkdir(parents=True)
    arguments = ["quickstart", "--dump-folder", "run", "--checkpoint.initial-load-path", "/no/such"]
    assert "there is no folder /no/such" in refused(*arguments)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_sizes_are_those_of_their_models(recipe: str) -> None:
    entry = RECIPES[recipe]
    config = configs.parse(entry.module, entry.config, [], "cpu")
    with torch.device("meta"):
        parameters = sum(p.numel() for p in config.model_spec.model.build().parameters())
    unit = {"M": 1e6, "B": 1e9}[entry.size[-1]]
    assert entry.size == f"{parameters / unit:.1f} {entry.size[-1]}"
    shape = model_shape(config)
    assert f"{shape.n_layers} layers x {config.model_spec.model.dim}" in entry.model
    if shape.n_experts:
        assert f"{shape.n_experts} experts" in entry.model


def test_a_users_override_takes_the_place_of_ours() -> None:
    config = configs.parse(
        "llama3",
        "llama3_debugmodel",
        ["--override.imports", "npu_train.overrides.attention.masked_flex_attention"],
        "cpu",
    )
    before = list(config.override.imports)
    assert configs._add_override(config, configs.FlexAttention.Config, "npu_train.other.flex") is not None
    assert config.override.imports == before


def test_run_json_survives_a_round_trip() -> None:
    from npu_train.request import RunRequest

    request = RunRequest("m", "c", ("--a", "1"), data="数据.txt")
    assert RunRequest.from_json(request.to_json()) == request
    assert json.loads(request.to_json())["data"] == "数据.txt"
