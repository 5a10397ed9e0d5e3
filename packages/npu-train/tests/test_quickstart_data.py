"""The quickstart corpus and tokenizer that ship with the package."""

import importlib.util
import json
import re
import unicodedata
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer

DATA = Path(str(files("npu_train"))) / "assets" / "quickstart"
SCRIPT = Path(__file__).parents[1] / "scripts" / "make_quickstart_data.py"

ENGLISH = "\"Oh dear!\" said the White Rabbit;  it's 12:45 -- I shall be late.\n\n\tFor a moment, she didn't answer."
CHINESE = "子曰\uff1a“学而时习之\uff0c不亦说乎\uff1f”\n\u3000\u3000话说天下大势\uff0c分久必合\uff0c合久必分。「龘」"
EMOJI = "训练 🚀 done 👩‍🔬🇨🇳 naïve café \u2028 \U0010ffff"


def read_jsonl(name: str) -> list[dict[str, str]]:
    content = (DATA / name).read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.decode("utf-8")[:-1].split("\n")]


def utf8_bytes(documents: list[dict[str, str]], lang: str | None = None) -> int:
    return sum(len(d["text"].encode()) for d in documents if lang in (None, d["lang"]))


@pytest.fixture(scope="module")
def corpus() -> list[dict[str, str]]:
    return read_jsonl("corpus.jsonl")


@pytest.fixture(scope="module")
def validation() -> list[dict[str, str]]:
    return read_jsonl("validation.jsonl")


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(tokenizer_path=str(DATA / "tokenizer"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_quickstart_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sizes() -> None:
    assert 850_000 <= (DATA / "corpus.jsonl").stat().st_size <= 1_000_000
    assert 30_000 <= (DATA / "validation.jsonl").stat().st_size <= 50_000
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) <= 1_000_000


@pytest.mark.parametrize("name", ["corpus.jsonl", "validation.jsonl"])
def test_documents_are_clean(name: str) -> None:
    for document in read_jsonl(name):
        text = document["text"]
        title = document["title"]
        assert set(document) == {"text", "title", "author", "lang"}, title
        assert all(isinstance(value, str) and value for value in document.values()), title
        assert document["lang"] in ("en", "zh"), title
        assert 100 <= len(text) <= 20_000, title
        assert unicodedata.is_normalized("NFC", text), title
        # control, format, private-use and unassigned characters, and the replacement character, are conversion damage
        damaged = {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn")} | (
            {"\ufffd"} & {*text}
        )
        assert not damaged, title
        assert not re.search(r"</?[a-zA-Z]|&[a-z]+;|https?:|www\.|[ \t]\n|\n{3}|Gutenberg|<\|", text), title
        han = sum("\u4e00" <= c <= "\u9fff" for c in text) / len(text)
        assert han > 0.6 if document["lang"] == "zh" else han == 0, title


def test_files_keep_characters_readable() -> None:
    assert b"\\u" not in (DATA / "corpus.jsonl").read_bytes()


def test_share_of_languages(corpus: list[dict[str, str]]) -> None:
    assert 0.30 <= utf8_bytes(corpus, "zh") / utf8_bytes(corpus) <= 0.40


def test_every_prefix_is_a_mix(corpus: list[dict[str, str]]) -> None:
    for end in range(1, len(corpus)):
        prefix = corpus[:end]
        if utf8_bytes(prefix) >= 50_000:
            assert 0.25 <= utf8_bytes(prefix, "zh") / utf8_bytes(prefix) <= 0.50, end


def test_validation_has_both_languages(validation: list[dict[str, str]]) -> None:
    assert 0.30 <= utf8_bytes(validation, "zh") / utf8_bytes(validation) <= 0.50


def test_no_duplicates_and_validation_is_held_out(
    corpus: list[dict[str, str]], validation: list[dict[str, str]]
) -> None:
    documents = corpus + validation
    assert len({d["title"] for d in documents}) == len(documents)
    assert len({re.sub(r"\W", "", d["text"]) for d in documents}) == len(documents)
    paragraphs = {p for d in corpus for p in d["text"].split("\n") if len(p.encode()) >= 60}
    shared = {p for d in validation for p in d["text"].split("\n")} & paragraphs
    assert not shared


def test_provenance_lists_every_work_and_author(corpus: list[dict[str, str]], validation: list[dict[str, str]]) -> None:
    provenance = (DATA / "PROVENANCE.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in provenance.split("\n") if line.startswith("|")]
    works = {row[0].split(" (")[0] for row in rows if len(row) == 5}
    essays = {(essay, row[0].split(" (")[0]) for row in rows if len(row) == 3 for essay in row[2].split(", ")}
    for document in corpus + validation:
        work, part = re.split(r": |\uff1a", document["title"], maxsplit=1)
        assert work in works, document["title"]
        if work == "古文观止":
            assert (part, document["author"]) in essays


def test_vocabulary(tokenizer: HuggingFaceTokenizer) -> None:
    assert tokenizer.get_vocab_size() == 2048
    assert sorted(tokenizer.get_vocab().values()) == list(range(2048))


def test_torchtitan_finds_the_special_tokens(tokenizer: HuggingFaceTokenizer) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token) == (
        "<|begin_of_text|>",
        "<|end_of_text|>",
    )
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_boundaries_are_added_only_on_request(tokenizer: HuggingFaceTokenizer) -> None:
    plain = tokenizer.encode(ENGLISH)
    assert not {0, 1} & set(plain)
    assert tokenizer.encode(ENGLISH, add_bos=True, add_eos=True) == [0, *plain, 1]
    assert tokenizer.decode([0, *plain, 1]) == ENGLISH
    assert tokenizer.encode("<|begin_of_text|>a<|end_of_text|>") == [
        0,
        *tokenizer.encode("a"),
        1,
    ]


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, EMOJI, ""], ids=["english", "chinese", "emoji", "empty"])
def test_round_trip(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_corpus_round_trip(tokenizer: HuggingFaceTokenizer, corpus: list[dict[str, str]]) -> None:
    for document in corpus:
        assert tokenizer.decode(tokenizer.encode(document["text"])) == document["text"], document["title"]


@pytest.mark.parametrize(("lang", "bytes_per_token"), [("en", 2.8), ("zh", 2.3)])
def test_held_out_text_is_compressed(
    tokenizer: HuggingFaceTokenizer,
    validation: list[dict[str, str]],
    lang: str,
    bytes_per_token: float,
) -> None:
    tokens = sum(len(tokenizer.encode(d["text"])) for d in validation if d["lang"] == lang)
    assert utf8_bytes(validation, lang) / tokens > bytes_per_token


def test_script_rebuilds_the_same_bytes(script: ModuleType, tmp_path: Path) -> None:
    assert script.main([str(tmp_path)]) == 0
    shipped = {path.name: path.read_bytes() for path in (DATA / "tokenizer").iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == shipped


@pytest.mark.parametrize("line", ['{"text": 1}', "[]", "{", ""])
def test_script_names_the_broken_line(
    script: ModuleType, tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n{{"text": "fine"}}\n', encoding="utf-8")
    assert script.main([str(tmp_path / "out"), "--corpus", str(path)]) == 2
    assert f"{path}:2: " in capsys.readouterr().err


def test_script_refuses_too_little_text(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.jsonl"
    path.write_text('{"text": "a few words"}\n', encoding="utf-8")
    assert script.main([str(tmp_path / "out"), "--corpus", str(path)]) == 2
    assert "add text" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
