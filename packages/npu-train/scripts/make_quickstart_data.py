"""Rebuild the quickstart tokenizer from the quickstart corpus, byte for byte.

How the corpus was gathered: the texts come out of four distributed packages (their names, versions and licences, and
the dates that put each work in the public domain, are in `PROVENANCE.md` beside the corpus). Each work was cut at its
own seams (chapters, scenes, essays, a poet's poems), hard-wrapped prose was joined into paragraphs, verse kept its
lines, editors' notes and variant readings were removed, Chinese in traditional characters was converted to simplified
ones, and everything was normalised to NFC with Unix line ends. A few documents became `validation.jsonl`; the others
were shuffled once with a fixed seed and interleaved by language, so that any prefix of `corpus.jsonl` holds English
and Chinese in about the same share as the whole. The corpus is the source from here on: this script reads it and
never writes it.

The tokenizer is a byte-level BPE, so that any text survives a round trip. Its 2048 entries are the two document
boundaries, the 256 bytes and 1790 merges, few enough that an embedding of it costs next to nothing in a small model.

Run it with no arguments to rewrite the tokenizer that ships with the package, or give another output folder:

    python packages/npu-train/scripts/make_quickstart_data.py [FOLDER]
"""

import argparse
import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

DATA = Path(__file__).parents[1] / "src" / "npu_train" / "assets" / "quickstart"
VOCAB_SIZE = 2048
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"


def read_texts(corpus: Path) -> list[str]:
    """Read the documents of a corpus.

    Args:
        corpus: A JSONL file whose lines are objects with a string `text`.

    Returns:
        The texts in file order.

    Raises:
        ValueError: A line is not such an object; the message names the file and the line.
        OSError: The file cannot be read.
    """
    texts = []
    # not splitlines(): it would also break at U+2028 and the like, which JSON allows inside a string
    for number, line in enumerate(corpus.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
        try:
            text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            message = f'{corpus}:{number}: expected a JSON object with a string "text"; restore this line'
            raise ValueError(message) from error
        texts.append(text)
    return texts


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE with `tokenizers.trainers.BpeTrainer`.

    Args:
        texts: The training documents; their order does not matter.
        vocab_size: Entries of the vocabulary, special tokens and the 256 bytes included.

    Returns:
        The tokenizer. BOS has id 0 and EOS id 1; neither is added by `encode`, which is the caller's choice.

    Raises:
        ValueError: The texts yield too few merges to fill the vocabulary.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            AddedToken(BOS, special=True, normalized=False),
            AddedToken(EOS, special=True, normalized=False),
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the corpus yields {tokenizer.get_vocab_size()} vocabulary entries, not {vocab_size}; "
            "add text or ask for a smaller vocabulary"
        )
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Serialise a tokenizer the way `torchtitan.components.tokenizer.HuggingFaceTokenizer` reads it.

    Args:
        tokenizer: A tokenizer of `train_tokenizer`.

    Returns:
        The bytes of each file, by file name.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": (tokenizer.to_str() + "\n").encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def main(argv: list[str] | None = None) -> int:
    """Write the tokenizer files.

    Args:
        argv: Command line arguments, those of the process by default.

    Returns:
        The exit code: 0 written, 2 the corpus or the output folder is unusable.
    """
    parser = argparse.ArgumentParser(description="Rebuild the quickstart tokenizer from the quickstart corpus.")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=DATA / "tokenizer",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=DATA / "corpus.jsonl",
        help="default: %(default)s",
    )
    args = parser.parse_args(argv)
    try:
        files = tokenizer_files(train_tokenizer(read_texts(args.corpus)))
        args.folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (args.folder / name).write_bytes(content)
    except (OSError, ValueError) as error:
        print(f"cannot rebuild the tokenizer: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
