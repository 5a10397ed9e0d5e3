"""Text files as packed training rows whose global order does not depend on how many processes read them.

A file of documents is tokenised once into the user's cache, then every process maps the tokens and picks its rows by
number. Row ``n`` of the run is the same text for any data-parallel degree, so a run can be resumed on another number of
processes and its loss goes on as if it had not been interrupted.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from tqdm import tqdm

from .console import say
from .errors import InputError
from .files import SUFFIXES, data_files

END_OF_DOCUMENT = "<|endoftext|>"
# Long texts are tokenised in pieces of about this many characters, cut at a line end.
_PIECE_CHARACTERS = 1 << 20
_CACHE_VERSION = 1
_STALE_S = 24 * 3600


def _read_text(path: Path) -> Iterator[tuple[str, bool]]:
    """Documents end at a line that holds only ``<|endoftext|>``, else with the file."""
    piece: list[str] = []
    size = 0
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if "\0" in line:
                raise InputError(
                    f"{path}, line {number}: a NUL character, so it is no text file. Write it again as text."
                )
            ends = line.strip() == END_OF_DOCUMENT
            if not ends:
                piece.append(line)
                size += len(line)
            if ends or size >= _PIECE_CHARACTERS:
                yield "".join(piece), ends
                piece, size = [], 0
    yield "".join(piece), True


def _text_of_line(line: str, field: str) -> str:
    """The text of one line of JSONL; a ``ValueError`` says why there is none."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply. Each line is one object") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON ({getattr(error, 'msg', error)}). Each line is one object") from None
    if not isinstance(record, dict):
        raise ValueError(f"no text under '{field}' (it has: {type(record).__name__}). Each line is one object")
    text = record.get(field)
    if not isinstance(text, str):
        holds = f"'{field}' holds {json.dumps(text)[:40]}, not text" if field in record else f"no text under '{field}'"
        names = ascii(", ".join(record))[1:-1]
        raise ValueError(f"{holds} (it has: {names}). Name the field with --text-field")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair (\\u{ord(text[error.start]):04x}), which is no character") from None
    return text


def _read_jsonl(path: Path, field: str) -> Iterator[tuple[str, bool]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = _text_of_line(line, field)
            except ValueError as error:
                raise InputError(f"{path}, line {number}: {error}.") from None
            yield text, True


def _read_parquet(path: Path, field: str) -> Iterator[tuple[str, bool]]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]}).") from None
    if field not in file.schema_arrow.names:
        raise InputError(
            f"{path}: no column '{field}' (it has: {', '.join(file.schema_arrow.names)}). "
            "Name the column with --text-field."
        )
    if file.schema_arrow.names.count(field) > 1:
        raise InputError(f"{path}: several columns are called '{field}'. Leave one of them.")
    kind = file.schema_arrow.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise InputError(f"{path}: the column '{field}' holds {kind}, not text. Name another with --text-field.")
    for batch in file.iter_batches(columns=[field]):
        for value in batch.column(0).to_pylist():
            if value:
                yield value, True


def read_documents(path: Path, text_field: str = "text") -> Iterator[tuple[str, bool]]:
    """Yield ``(text, ends_document)`` pieces of a data file.

    Raises:
        InputError: the file is not valid UTF-8, JSON or parquet, or lacks the field.
    """
    readers = {
        "text": lambda: _read_text(path),
        "jsonl": lambda: _read_jsonl(path, text_field),
        "parquet": lambda: _read_parquet(path, text_field),
    }
    kind = SUFFIXES[path.suffix.lower()]
    try:
        yield from readers[kind]()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read ({str(error).splitlines()[0]}).") from None
    except UnicodeDecodeError:
        if kind == "parquet":
            raise InputError(f"{path}: a damaged parquet file. Write it again.") from None
        raise InputError(
            f"{path}: not UTF-8 text. Convert it, for example: iconv -f GB18030 -t UTF-8 {path.name} > utf8.txt"
        ) from None


def cache_folder() -> Path:
    """Where tokenised data is kept: ``$XDG_CACHE_HOME/npu-train/tokens`` or ``~/.cache/npu-train/tokens``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "npu-train" / "tokens"


class TokenFile:
    """Tokenised documents on disk, mapped into memory.

    Raises:
        ValueError: the files are damaged.

    Attributes:
        tokens: 1-D array of token ids, the documents one behind the other.
        starts: 1-D int64 array, the index of the first token of each document, closed by the number of tokens.
    """

    def __init__(self, folder: Path):
        try:
            meta = json.loads((folder / "meta.json").read_text())
            self.tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
            self.starts = np.fromfile(folder / "starts.bin", dtype=np.int64)
            whole = len(self.tokens) == meta["n_tokens"] == self.starts[-1]
        except (FileNotFoundError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder} is damaged ({error})") from None
        if not whole:
            raise ValueError(f"{folder} is damaged (its files do not fit together)")

    def rows(self, seq_len: int) -> int:
        """How many rows of ``seq_len`` tokens there are; what is left over at the end is not used."""
        return (len(self.tokens) - 1) // seq_len

    def row(self, index: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row ``index`` as ``(input, positions, labels)``, int64 tensors of shape (seq_len,).

        Positions count from 0 within each document and from 0 at the start of the row: torchtitan reads the document
        boundaries off them. The label of a document's last token is ``IGNORE_INDEX``: none predicts the next document.
        """
        begin = index * seq_len
        where = np.arange(begin, begin + seq_len)
        document = np.searchsorted(self.starts, where, side="right") - 1
        tokens = np.asarray(self.tokens[begin : begin + seq_len + 1]).astype(np.int64)
        labels = tokens[1:].copy()
        labels[where == self.starts[document + 1] - 1] = IGNORE_INDEX
        positions = where - np.maximum(self.starts[document], begin)
        return torch.from_numpy(tokens[:-1]), torch.from_numpy(positions), torch.from_numpy(labels)


def _write_tokens(folder: Path, files: list[Path], tokenizer: BaseTokenizer, text_field: str) -> None:
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    starts, n_tokens, begins = [], 0, True
    with (
        (folder / "tokens.bin").open("wb") as out,
        tqdm(
            total=sum(f.stat().st_size for f in files),
            unit="B",
            unit_scale=True,
            delay=2,
            desc="tokenizing",
            disable=None,
        ) as bar,
    ):
        for file in files:
            for text, ends in read_documents(file, text_field):
                bar.update(len(text.encode()))
                # An end mark at the very end of a file leaves one empty piece behind it.
                if not text.strip() and begins:
                    continue
                if begins:
                    starts.append(n_tokens)
                ids = tokenizer.encode(text, add_bos=begins, add_eos=ends)
                out.write(np.asarray(ids, dtype=dtype).tobytes())
                n_tokens += len(ids)
                begins = ends
    np.asarray([*starts, n_tokens], dtype=np.int64).tofile(folder / "starts.bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": np.dtype(dtype).name, "n_tokens": n_tokens}))


def _remove_leftovers(cache: Path, prefix: str) -> None:
    """Remove what processes that were killed left: folders called ``prefix``, and those not written to for long."""
    for folder in cache.glob("tmp*"):
        # Another process may be just finishing its own.
        with contextlib.suppress(FileNotFoundError):
            newest = max(path.lstat().st_mtime for path in [folder, *folder.rglob("*")])
            if folder.name.startswith(prefix) or time.time() - newest > _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)


def tokenize(
    path: str | os.PathLike, tokenizer: BaseTokenizer, tokenizer_path: str, text_field: str = "text"
) -> TokenFile:
    """Tokenise ``path`` once; later calls, also from other processes, map the result.

    Args:
        path: A .txt, .md, .jsonl or .parquet file, or a folder of them.
        tokenizer: Encodes a document with its begin and end marks.
        tokenizer_path: Folder of the tokenizer; its files are part of the cache key.
        text_field: Field (JSONL) or column (parquet) that holds the text.

    Raises:
        InputError: the data cannot be read, or holds no text.
    """
    files = data_files(path)
    key = hashlib.sha256(f"{_CACHE_VERSION}|{text_field}".encode())
    for file in [*files, *sorted(p for p in Path(tokenizer_path).iterdir() if p.is_file())]:
        stat = file.stat()
        key.update(f"|{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode())
    cache = cache_folder()
    folder = cache / key.hexdigest()[:32]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise InputError(
            f"the token cache {cache} cannot be written ({error.strerror}). Point XDG_CACHE_HOME at a writable folder."
        ) from None
    with lock:
        # The first process of a machine tokenises; the others wait here and then map its result.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            try:
                return TokenFile(folder)
            except ValueError as error:
                say(f"note: {error}: the text is turned into tokens again.")
                shutil.rmtree(folder)
        # Of this data on this machine none is being written: the lock is ours.
        prefix = f"tmp-{socket.gethostname()}-{folder.name}-"
        _remove_leftovers(cache, prefix)
        with tempfile.TemporaryDirectory(dir=cache, prefix=prefix) as scratch:
            unfinished = Path(scratch) / "tokens"
            unfinished.mkdir()
            _write_tokens(unfinished, files, tokenizer, text_field)
            if json.loads((unfinished / "meta.json").read_text())["n_tokens"] == 0:
                raise InputError(f"the data {path} is empty: it holds no text to train on.")
            try:
                unfinished.rename(folder)
            except OSError:
                # A file system whose locks do not reach other machines: one of them was first.
                if not folder.exists():
                    raise
        return TokenFile(folder)


class TextDataLoader(BaseDataLoader):
    """Packed rows of a text, JSONL or parquet file, for any number of data-parallel ranks.

    Each batch is ``({"input": (B, L), "positions": (B, L)}, labels (B, L))``, all int64. One epoch visits every row
    once, in an order shuffled by ``seed`` and the epoch. Its state is the number of rows that all ranks have consumed.

    Args:
        config: See ``Config``.
        dp_world_size: Number of data-parallel ranks.
        dp_rank: This rank.
        tokenizer: The run's tokenizer.
        seq_len: Tokens a row, L.
        local_batch_size: Rows a batch, B.

    Raises:
        InputError: the data is missing, unreadable, empty, or shorter than one global batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        text_field: str = "text"
        """Field of a JSONL line or column of a parquet file that holds the text"""

        infinite: bool = True
        """Start over when the data is used up"""

        shuffle: bool = True
        """Visit the rows of each epoch in a shuffled order"""

        seed: int = 0
        """Seed of the shuffled order"""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ):
        if not config.dataset_path:
            raise InputError("no training data: give --data a .txt, .jsonl or .parquet file.")
        self._tokens = tokenize(config.dataset_path, tokenizer, tokenizer.tokenizer_path, config.text_field)
        self._seq_len = seq_len
        self._config = config
        self._dp_world_size, self._dp_rank = dp_world_size, dp_rank
        self._batch_size = local_batch_size
        self._rows_seen = 0
        self._n_rows = self._tokens.rows(seq_len)
        self._order: tuple[int, torch.Tensor] | None = None
        needed = 1 if config.infinite else dp_world_size * local_batch_size
        if self._n_rows < needed:
            raise InputError(too_short(config.dataset_path, len(self._tokens.tokens), seq_len, needed))

    def _row_number(self, position: int) -> int:
        epoch, offset = divmod(position, self._n_rows)
        if not self._config.shuffle:
            return offset
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed((self._config.seed * 1_000_003 + epoch) % 2**63)
            self._order = (epoch, torch.randperm(self._n_rows, generator=generator))
        return int(self._order[1][offset])

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        rows_a_batch = self._dp_world_size * self._batch_size
        while self._config.infinite or self._rows_seen + rows_a_batch <= self._n_rows:
            first = self._rows_seen + self._dp_rank * self._batch_size
            rows = [self._tokens.row(self._row_number(first + i), self._seq_len) for i in range(self._batch_size)]
            input_BL, positions_BL, labels_BL = (torch.stack(column) for column in zip(*rows, strict=True))
            # Counted before the batch is handed out: a checkpoint taken while it is trained on has consumed it.
            self._rows_seen += rows_a_batch
            yield {"input": input_BL, "positions": positions_BL}, labels_BL

    def state_dict(self) -> dict[str, Any]:
        return {"rows_seen": self._rows_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._rows_seen = state_dict["rows_seen"]


def too_short(path: str, n_tokens: int, seq_len: int, rows: int) -> str:
    """The sentence for data that does not fill the first batch."""
    return (
        f"the data {path} is too short: {n_tokens} tokens do not fill a batch of {rows} rows of {seq_len} tokens. "
        "Use more text, or lower --training.seq-len or --training.local-batch-size."
    )
