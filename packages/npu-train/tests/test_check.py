"""Every bad configuration is told before anything starts, all at once, with exit code 2."""

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed
from safetensors.torch import save_file
from tokenizers import Tokenizer

from npu_train import cli, configs
from npu_train.check import model_shape
from npu_train.errors import InputError
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


KWARGS = "--optimizer.param-groups.0.optimizer-kwargs"
PP = ["quickstart", "--nproc", "2", "--parallelism.pipeline-parallel-degree", "2"]
# Each of these is one configuration: options of the quickstart, and what the answer says of each.
VALUES = {
    "optimizer": {
        f"{KWARGS}.lr nan": "lr is nan; it must be a finite number, at least 0",
        f"{KWARGS}.eps nan": "eps is nan; it must be a finite number, at least 0",
        f"{KWARGS}.weight-decay inf": "weight-decay is inf; it must be a finite number",
        f"{KWARGS}.betas 0.9 1.5": "betas is (0.9, 1.5); it must be two numbers, each from 0 to below 1",
        "--optimizer.param-groups.0.pattern (": "--optimizer.param-groups.0.pattern: '(' is no regular expression",
    },
    "more of it": {
        f"{KWARGS}.lr -1": "lr is -1.0; it must be a finite number, at least 0",
        f"{KWARGS}.eps -1": "eps is -1.0; it must be a finite number, at least 0",
        f"{KWARGS}.betas 0.9 nan": "it must be two numbers, each from 0 to below 1",
        "--optimizer.param-groups.0.pattern nothing_like_it": "'nothing_like_it' matches no parameter",
    },
    "the rest": {
        "--training.gc-freq 0": "--training.gc-freq is 0; it must be at least 1",
        "--training.max-norm nan": "--training.max-norm is nan; it must be above 0: gradients",
        "--lr-scheduler.warmup-steps -1": "--lr-scheduler.warmup-steps is -1; it must be at least 0",
        "--lr-scheduler.decay-ratio nan": "--lr-scheduler.decay-ratio is nan; it must be a share of the steps",
        "--lr-scheduler.total-steps 1": "--lr-scheduler.total-steps is 1; it must be at least --training.steps (200)",
        "--lr-scheduler.min-lr-factor -0.1": "--lr-scheduler.min-lr-factor is -0.1; it must be a share",
        "--debug.seed 100000000000000000000000": "it must be from 0 to 2**64 - 1",
        "--comm.init-timeout-seconds 0": "--comm.init-timeout-seconds is 0; it must be at least 1",
        "--override.imports os.path.join": "--override.imports: ",
        "--loss.loss-fn.global-vocab-size 5": "global-vocab-size is 5; it must be the model's vocabulary, 2048",
        "--parallelism.context-parallel-load-balancer foo": "load-balancer is foo; it must be headtail, ptrr or None",
        "--checkpoint.folder metrics.jsonl": "--checkpoint.folder: metrics.jsonl is a file of the run's own",
        "--profiler.enable-profiling": "",
        "--profiler.profile-freq 1": "--profiler.profile-freq is 1; it must be at least --profiler.profiler-warmup + ",
        "--profiler.profiler-active -1": "--profiler.profiler-active is -1",
    },
    "and its other ends": {
        "--optimizer.param-groups.0.pattern layers": (
            "no pattern of --optimizer.param-groups matches tok_embeddings.weight (3 parameters in all are left out)"
        ),
        "--training.max-norm -1": "--training.max-norm is -1.0; it must be above 0: gradients",
        "--lr-scheduler.decay-ratio 1.5": "--lr-scheduler.decay-ratio is 1.5; it must be a share of the steps",
        "--debug.seed -1": "--debug.seed is -1; it must be from 0",
        "--checkpoint.folder run.json": "--checkpoint.folder: run.json is a file of the run's own",
        "--checkpoint.initial-load-path=": "--checkpoint.initial-load-path is empty. Is a shell variable not set?",
        "--profiler.enable-profiling": "",
        "--profiler.profile-freq 0": "--profiler.profile-freq is 0",
    },
}


@pytest.mark.parametrize("case", VALUES)
def test_bad_values(refused, case: str) -> None:
    error = refused("quickstart", *(word for option in VALUES[case] for word in option.split(" ")))
    for message in VALUES[case].values():
        assert message in error


CASES |= {
    "layers of a stage": (
        [*PP, "--parallelism.pipeline-parallel-layers-per-stage", "0"],
        ["layers-per-stage is 0; it must be at least 1"],
    ),
    # 4 layers and 2 for the ends, 4 of them on a stage: 2 stages where the schedule needs 4.
    "stages of an interleaved schedule": (
        [
            *PP,
            "--parallelism.pipeline-parallel-layers-per-stage",
            "4",
            "--parallelism.pipeline-parallel-schedule",
            "Interleaved1F1B",
        ],
        ["makes 2 pipeline stages", "needs a multiple of 2, at least 4"],
    ),
    "schedule file": (
        [*PP, "--parallelism.pipeline-parallel-schedule-csv", "/nope"],
        ["pipeline-parallel-schedule-csv: there is no file /nope"],
    ),
    "modules of a stage": (
        [*PP, "--parallelism.module-fqns-per-model-part", "foo", "bar"],
        ["the model has no foo, bar", "no stage holds tok_embeddings, norm, lm_head, layers.0, layers.1", "layers.3"],
    ),
    "large pipeline batch": (
        [
            *PP,
            "--parallelism.pipeline-parallel-schedule",
            "Interleaved1F1B",
            "--training.local-batch-size",
            "100000001",
        ],
        ["Use 100000000 or 100000002"],
    ),
    "module path": (["--module", "../x", "--config", "x"], ["'../x' given to --module is no module name"]),
    "module dots": (["--module", "..", "--config", "x"], ["'..' given to --module is no module name"]),
    "no configuration function": (
        ["--module", "os.path", "--config", "join"],
        ["'join' of module 'os.path' is no configuration function"],
    ),
    "a function of something else": (
        ["--module", "logging.config", "--config", "stopListening"],
        ["the function returns NoneType, not a Trainer.Config"],
    ),
    "initial weights without checkpoints": (
        [*LLAMA, "--checkpoint.initial-load-path", "/somewhere"],
        ["--checkpoint.initial-load-path needs checkpoints, which are off. Add --checkpoint.enable"],
    ),
    "weights of Hugging Face that are not there": (
        ["quickstart", "--checkpoint.initial-load-in-hf"],
        ["--hf-assets-path", "holds no .safetensors files", "Name the folder of the weights"],
    ),
    "torchrun's port": (
        ["quickstart", "--nproc", "2", "--master-port", "abc"],
        ["torchrun: argument --master-port", "invalid int value: 'abc'"],
    ),
    "restarts": (["quickstart", "--max-restarts", "x"], ["torchrun: argument --max-restarts"]),
    "negative restarts": (["quickstart", "--max-restarts", "-1"], ["torchrun: max_restarts must be >= 0"]),
    "nodes": (["quickstart", "--nnodes", "x", "--dump-folder", "run"], ["torchrun: ", "'x'"]),
    "rendezvous": (["quickstart", "--rdzv-backend", "foo"], ["unknown --rdzv-backend 'foo'. Known: static, c10d"]),
    "log folder": (["quickstart", "--log-dir", "/proc/x"], ["the log folder /proc/x", "--log-dir"]),
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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--training.step", "5"], "Unrecognized options: --training.step"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--nproc", "zero"], "--nproc is 'zero'"),
    ],
)
def test_what_stops_the_parsing_does_not_hide_the_rest(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    paths = ["--data", "gone.txt", "--hf-assets-path", "nowhere", "--dump-folder", "/proc/x"]
    assert cli.main(["run", "quickstart", *paths, *arguments]) == 2
    error = capsys.readouterr().err
    assert "4 problems; nothing was started" in error
    for text in (problem, "data file not found", "--hf-assets-path: there is no folder nowhere", "/proc/x"):
        assert text in error


def test_the_checkpoint_folder_is_a_file(refused, in_tmp: Path) -> None:
    (in_tmp / "file").write_text("")
    error = refused("quickstart", "--checkpoint.folder", str(in_tmp / "file"))
    assert f"{in_tmp}/file is a file. Choose another --checkpoint.folder" in error


def test_initial_weights_of_the_other_format(refused, in_tmp: Path) -> None:
    _save({"w": torch.ones(10)}, "dcp")
    (in_tmp / "hf").mkdir()
    save_file({"w": torch.ones(10)}, in_tmp / "hf" / "model.safetensors")
    (in_tmp / "empty").mkdir()
    path, in_hf = ["quickstart", "--checkpoint.initial-load-path"], "--checkpoint.initial-load-in-hf"
    assert "It is a checkpoint of torchtitan: leave that out" in refused(*path, str(in_tmp / "dcp"), in_hf)
    assert f"Add {in_hf}" in refused(*path, str(in_tmp / "hf"))
    assert "holds no .safetensors files" in refused(*path, str(in_tmp / "empty"), in_hf)
    assert "is no checkpoint" in refused(*path, str(in_tmp / "empty"))


RUN = {"w": torch.ones(10), "train_state": {"step": torch.tensor(5)}}


def test_an_old_run_is_not_continued_without_being_asked(refused) -> None:
    _save(RUN, "run/checkpoint/step-5")
    error = refused("quickstart", "--dump-folder", "run")
    assert "run holds an earlier run, up to step-5. Add --resume" in error


def test_a_restart_by_torchrun_continues(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_train.request import RunRequest
    from npu_train.worker import prepare

    _save(RUN, "run/checkpoint/step-5")
    quickstart = RECIPES["quickstart"]
    request = RunRequest(quickstart.module, quickstart.config, device="cpu", dump_folder="run")
    with pytest.raises(InputError, match="Add --resume"):
        prepare(request, 1, announce=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert prepare(request, 1, announce=False).dump_folder == "run"


def test_a_run_does_not_go_backwards(refused) -> None:
    _save(RUN, "run/checkpoint/step-5")
    error = refused("quickstart", "--dump-folder", "run", "--resume", "--training.steps", "4")
    assert "--training.steps is 4, but the checkpoint run/checkpoint/step-5 is at step 5 already" in error


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_nothing_left_to_train(in_tmp: Path, capsys: pytest.CaptureFixture[str], nproc: str) -> None:
    _save(RUN, "run/checkpoint/step-5")
    source = ["--module", "npu_train.recipe_configs", "--config", "quickstart"]
    options = ["--device", "cpu", "--dump-folder", "run", "--resume", "--training.steps", "5"]
    batch = ["--training.local-batch-size", "4"]
    assert cli.main(["run", *source, *options, *batch, "--nproc", nproc]) == 0
    assert "nothing to do: the checkpoint run/checkpoint/step-5 is at step 5 of 5" in capsys.readouterr().out
    assert sorted(path.name for path in Path("run").iterdir()) == ["checkpoint"]


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
