"""Packed rows against a packing written out token by token."""

import json
import os
import random
import shutil
import socket
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from npu_train.data import TextDataLoader, read_documents, tokenize
from npu_train.errors import InputError
from npu_train.files import data_files, not_read

BOS, EOS, IGNORE = 1, 2, -100


class ByteTokenizer:
    """Byte b is id b + 3."""

    def __init__(self, folder: Path):
        self.tokenizer_path = str(folder)
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text("{}")

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [BOS] * add_bos + [byte + 3 for byte in text.encode()] + [EOS] * add_eos

    def get_vocab_size(self) -> int:
        return 259


@pytest.fixture(autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these tests looks at what is in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def cache() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "npu-train" / "tokens"


@pytest.fixture
def tokenizer(tmp_path: Path) -> ByteTokenizer:
    return ByteTokenizer(tmp_path / "tokenizer")


def naive_rows(documents: list[str], seq_len: int) -> list[tuple[list[int], list[int], list[int]]]:
    inputs, labels, documents_of = [], [], []
    for number, text in enumerate(documents):
        ids = [BOS, *(byte + 3 for byte in text.encode()), EOS]
        inputs += ids
        labels += [*ids[1:], IGNORE]
        documents_of += [number] * len(ids)
    rows = []
    for begin in range(0, (len(inputs) - 1) // seq_len * seq_len, seq_len):
        positions = []
        for i in range(begin, begin + seq_len):
            same = i > begin and documents_of[i] == documents_of[i - 1]
            positions.append(positions[-1] + 1 if same else 0)
        rows.append((inputs[begin : begin + seq_len], positions, labels[begin : begin + seq_len]))
    return rows


def loader(
    path: Path, tokenizer: ByteTokenizer, *, ranks: int = 1, rank: int = 0, batch: int = 1, seq_len: int = 8, **config
) -> TextDataLoader:
    return TextDataLoader(
        TextDataLoader.Config(dataset_path=str(path), **config),
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=tokenizer,
        seq_len=seq_len,
        local_batch_size=batch,
    )


@pytest.mark.parametrize("seq_len", [1, 3, 8, 50])
def test_rows_are_those_of_a_naive_packing(tmp_path: Path, tokenizer: ByteTokenizer, seq_len: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    documents = ["".join(rng.choices("abcé却\n", k=rng.randrange(1, 40))) + "." for _ in range(30)]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    expected = naive_rows(documents, seq_len)
    batches = list(loader(file, tokenizer, seq_len=seq_len, shuffle=False, infinite=False))
    got = [
        (inputs["input"][0].tolist(), inputs["positions"][0].tolist(), labels[0].tolist()) for inputs, labels in batches
    ]
    assert got == expected
    assert batches[0][0]["input"].dtype == batches[0][1].dtype == torch.int64


def test_text_documents_end_at_the_mark_and_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "two.txt"
    file.write_text("one\nstill one\n<|endoftext|>\ntwo\n")
    assert list(read_documents(file)) == [("one\nstill one\n", True), ("two\n", True)]


def test_a_folder_is_its_files_in_order(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("second")
    (folder / "a.md").write_text("first")
    (folder / "c.bin").write_text("not data")
    assert [file.name for file in data_files(folder)] == ["a.md", "b.txt"]
    tokens = tokenize(folder, tokenizer, tokenizer.tokenizer_path)
    assert tokens.tokens.tolist() == tokenizer.encode("first", True, True) + tokenizer.encode("second", True, True)
    assert tokens.starts.tolist() == [0, 7, 15]


def test_a_long_text_is_one_document(tmp_path: Path, tokenizer: ByteTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_train.data._PIECE_CHARACTERS", 10)
    file = tmp_path / "long.txt"
    text = "a line of text\n" * 20
    file.write_text(text)
    tokens = tokenize(file, tokenizer, tokenizer.tokenizer_path)
    assert tokens.tokens.tolist() == tokenizer.encode(text, True, True)
    assert tokens.starts.tolist() == [0, len(text) + 2]


def test_parquet_and_jsonl_hold_the_same_tokens(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    texts = ["eins", "zwei 二", "drei"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    streams = [
        tokenize(tmp_path / name, tokenizer, tokenizer.tokenizer_path, "body").tokens.tolist()
        for name in ("a.jsonl", "a.parquet")
    ]
    assert streams[0] == streams[1] == [i for text in texts for i in tokenizer.encode(text, True, True)]


@pytest.mark.parametrize(("ranks", "batch", "accumulate"), [(2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 4, 2)])
def test_a_step_sees_the_same_rows_on_any_number_of_ranks(
    tmp_path: Path, tokenizer: ByteTokenizer, ranks: int, batch: int, accumulate: int
) -> None:
    file = tmp_path / "data.txt"
    file.write_text("the quick brown fox jumps over the lazy dog " * 30)
    steps, reference = 5, []
    alone = iter(loader(file, tokenizer, batch=8))
    for _ in range(steps):
        reference.append(sorted(next(alone)[0]["input"].tolist()))
    iterators = [iter(loader(file, tokenizer, ranks=ranks, rank=rank, batch=batch)) for rank in range(ranks)]
    for step in range(steps):
        rows = [row for _ in range(accumulate) for it in iterators for row in next(it)[0]["input"].tolist()]
        assert sorted(rows) == reference[step]


def test_an_epoch_visits_every_row_once_and_the_next_in_another_order(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    file = tmp_path / "data.txt"
    file.write_text("".join(f"{i:07d} " for i in range(20)))
    rows = iter(loader(file, tokenizer, seq_len=8))
    epochs = [[tuple(next(rows)[0]["input"][0].tolist()) for _ in range(20)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == 20
    assert epochs[0] != epochs[1]


def test_the_state_resumes_on_another_number_of_ranks(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    file = tmp_path / "data.txt"
    file.write_text("".join(f"{i:07d} " for i in range(50)))
    whole = iter(loader(file, tokenizer, batch=4))
    expected = [next(whole)[0]["input"].tolist() for _ in range(6)]
    first = [loader(file, tokenizer, ranks=2, rank=rank, batch=2) for rank in range(2)]
    for it in [iter(part) for part in first]:
        for _ in range(3):
            next(it)
    states = [part.state_dict() for part in first]
    assert states[0] == states[1] == {"rows_seen": 12}
    resumed = loader(file, tokenizer, batch=4)
    resumed.load_state_dict(states[0])
    rest = iter(resumed)
    assert [next(rest)[0]["input"].tolist() for _ in range(3)] == expected[3:]


def test_tokens_are_cached_until_the_file_changes(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    file = tmp_path / "data.txt"
    file.write_text("some text that is long enough")
    tokenize(file, tokenizer, tokenizer.tokenizer_path)

    class Refuses(ByteTokenizer):
        def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
            raise AssertionError("the cached tokens should have been used")

    again = Refuses(tmp_path / "tokenizer")
    os.utime(tmp_path / "tokenizer" / "tokenizer.json", ns=(1, 1))
    os.utime(tmp_path / "tokenizer" / "tokenizer.json", ns=(2, 2))
    with pytest.raises(AssertionError, match="cached"):
        tokenize(file, again, tokenizer.tokenizer_path)
    tokenize(file, tokenizer, tokenizer.tokenizer_path)
    tokenize(file, again, tokenizer.tokenizer_path)
    file.write_text("another text that is long enough")
    with pytest.raises(AssertionError, match="cached"):
        tokenize(file, again, tokenizer.tokenizer_path)


def test_an_interrupted_tokenisation_leaves_nothing_that_looks_finished(
    tmp_path: Path, tokenizer: ByteTokenizer
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "good"}\n{"text": bad}\n')
    with pytest.raises(InputError, match="line 2: not valid JSON"):
        tokenize(file, tokenizer, tokenizer.tokenizer_path)
    assert [path.suffix for path in cache().iterdir()] == [".lock"]


BAD_FILES = {
    "missing.txt": (None, "data file not found"),
    "empty.txt": (b"", "is empty"),
    "blank.txt": (b"\n \n", "is empty"),
    "marks.txt": (b"<|endoftext|>\n<|endoftext|>\n", "is empty"),
    "gbk.txt": ("却说曹操".encode("gbk"), r"not UTF-8 text.*iconv"),
    "short.txt": (b"ab", "too short"),
    "data.csv": (b"a,b", r"'\.csv' files are not read"),
    "list.jsonl": (b"[1, 2]\n", "line 1: no text under 'text'"),
    "other.jsonl": (b'{"body": "x", "id": 1}\n', r"it has: body, id.*--text-field"),
    "null.jsonl": (b'{"text": null}\n', r"line 1: 'text' holds null, not text \(it has: text\)"),
    "surrogate.jsonl": (b'{"text": "a"}\n{"text": "b\\ud800"}\n', r"line 2: half a surrogate pair \(\\ud800\)"),
    "surrogate_name.jsonl": (b'{"\\ud800": "b"}\n', r"line 1: no text under 'text' \(it has: \\ud800\)"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "line 1: nested too deeply"),
    "long.jsonl": (b'{"text": "a"}\n{"n": ' + b"1" * 5000 + b"}\n", "line 2: not valid JSON"),
    "nul.txt": (b"good\n" + b"\0" * 50_000, "line 2: a NUL character"),
    "broken.parquet": (b"PAR1 not really", "not a readable parquet file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_data_is_told_in_one_paragraph(tmp_path: Path, tokenizer: ByteTokenizer, name: str) -> None:
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        loader(tmp_path / name, tokenizer)
    assert len(error.value.problems) == 1
    assert name in error.value.problems[0]


def test_a_parquet_with_the_column_twice(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    table = pyarrow.table([["x"], ["y"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: several columns are called 'text'"):
        loader(tmp_path / "a.parquet", tokenizer)


def test_a_pipe_is_no_data_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.txt")
    with pytest.raises(InputError, match=r"fifo\.txt is not a regular file"):
        data_files(tmp_path / "fifo.txt")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffone", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "one"}', encoding="utf-8")
    assert list(read_documents(tmp_path / "a.txt")) == [("one", True)]
    assert list(read_documents(tmp_path / "a.jsonl")) == [("one", True)]


def test_what_a_folder_holds_besides(tmp_path: Path) -> None:
    for name in ("a.txt", "b.csv", "c.TXT", ".hidden"):
        (tmp_path / name).write_text("text")
    (tmp_path / "more").mkdir()
    assert [file.name for file in data_files(tmp_path)] == ["a.txt", "c.TXT"]
    assert not_read(tmp_path) == ["b.csv", "more"]
    assert not_read(tmp_path / "a.txt") == []


@pytest.mark.parametrize("name", ["tokens.bin", "starts.bin", "meta.json"])
@pytest.mark.parametrize("size", [0, 5, None])
def test_a_damaged_cache_is_made_again_and_that_is_said(
    tmp_path: Path, tokenizer: ByteTokenizer, capsys: pytest.CaptureFixture[str], name: str, size: int | None
) -> None:
    file = tmp_path / "data.txt"
    file.write_text("some text")
    tokenize(file, tokenizer, tokenizer.tokenizer_path)
    (cached,) = cache().glob(f"*/{name}")
    if size is None:
        cached.unlink()
    else:
        os.truncate(cached, size)
    assert capsys.readouterr().out == ""
    for told in (1, 0):
        tokens = tokenize(file, tokenizer, tokenizer.tokenizer_path)
        assert tokens.tokens.tolist() == tokenizer.encode("some text", True, True)
        assert capsys.readouterr().out.count("is damaged") == told


def test_what_killed_processes_left_is_removed(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    file = tmp_path / "data.txt"
    file.write_text("some text")
    tokenize(file, tokenizer, tokenizer.tokenizer_path)
    (folder,) = (path for path in cache().iterdir() if path.is_dir())
    shutil.rmtree(folder)
    of_this_data = cache() / f"tmp-{socket.gethostname()}-{folder.name}-x"
    old, living = cache() / "tmpold", cache() / "tmpliving"
    for path in (of_this_data, old, living):
        path.mkdir()
        (path / "tokens.bin").write_text("half")
    for path in (old / "tokens.bin", old, living):
        os.utime(path, (1, 1))
    tokenize(file, tokenizer, tokenizer.tokenizer_path)
    assert sorted(path for path in cache().iterdir() if path.is_dir()) == sorted([folder, living])


def test_any_seed_will_do(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    file = tmp_path / "data.txt"
    file.write_text("x" * 100)
    assert next(iter(loader(file, tokenizer, seed=10**23)))[1].shape == (1, 8)


def test_parquet_without_the_column(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"no column 'text' \(it has: body\)"):
        loader(tmp_path / "a.parquet", tokenizer)


def test_finite_data_ends_with_the_last_whole_batch(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    file = tmp_path / "data.txt"
    file.write_text("x" * 100)
    assert len(list(loader(file, tokenizer, ranks=2, rank=1, batch=2, infinite=False))) == 3
    with pytest.raises(InputError, match="do not fill a batch of 16 rows"):
        loader(file, tokenizer, ranks=2, batch=8, infinite=False)
