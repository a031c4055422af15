"""The byte-level BPE tokenizer of K3-nano: trainer, files in K3's layout, fragment encoding.

Rule: digits are never merged, so K3's pre-tokeniser pattern gives one token per digit here; sums,
reversals and sorting depend on it. Text fragments never become special tokens.
"""

import base64
import collections
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import regex
import tiktoken

from scripts.train_nano.spec import KEPT_IN_TEXT, N_SPECIALS, NAMED_SPECIALS
from scripts.train_nano.xtml import Fragment

# K3's pre-tokeniser: eight alternatives, tried in this order.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]+[{_LOWER}&&[^\p{{Han}}]]*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_SPLIT = regex.compile(PATTERN, regex.V1)
Pair = tuple[bytes, bytes]


# ------------------------------------------------------------------------------------ training


def train_ranks(texts: Iterable[str], count: int) -> list[bytes]:
    """Byte-pair encoding: the 256 bytes, then the most frequent pair again and again."""
    frequency: collections.Counter[str] = collections.Counter()
    for text in texts:
        for piece in _SPLIT.findall(text):
            frequency.update(piece if piece[0].isdigit() else [piece])
    words = [[bytes([b]) for b in piece.encode()] for piece in frequency]
    merger = _Merger(words, list(frequency.values()))
    ranks = [bytes([b]) for b in range(256)]
    known = set(ranks)
    while len(ranks) < count and (pair := merger.best()):
        merged = pair[0] + pair[1]
        if merged not in known:
            ranks.append(merged)
            known.add(merged)
        merger.merge(pair, merged)
    return ranks


class _Merger:
    """Pair counts over all distinct words, kept up to date while pairs are merged."""

    def __init__(self, words: list[list[bytes]], frequency: list[int]):
        self.words, self.frequency = words, frequency
        self.counts: collections.Counter[Pair] = collections.Counter()
        self.where: collections.defaultdict[Pair, set[int]] = collections.defaultdict(set)
        for index in range(len(words)):
            self._count(index, 1)

    def best(self) -> Pair | None:
        """The most frequent pair, ties by bytes; None when nothing occurs twice."""
        if not self.counts:
            return None
        pair, count = max(self.counts.items(), key=lambda item: (item[1], item[0]))
        return pair if count > 1 else None

    def merge(self, pair: Pair, merged: bytes) -> None:
        for index in self.where.pop(pair):
            self._count(index, -1)
            self.words[index] = _merged_word(self.words[index], pair, merged)
            self._count(index, 1)
        self.counts.pop(pair, None)

    def _count(self, index: int, sign: int) -> None:
        word, amount = self.words[index], sign * self.frequency[index]
        for pair in itertools.pairwise(word):
            self.counts[pair] += amount
            if sign > 0:
                self.where[pair].add(index)
            elif self.counts[pair] <= 0:
                del self.counts[pair]


def _merged_word(word: list[bytes], pair: Pair, merged: bytes) -> list[bytes]:
    result, i = [], 0
    while i < len(word):
        if tuple(word[i : i + 2]) == pair:
            result.append(merged)
            i += 2
        else:
            result.append(word[i])
            i += 1
    return result


# --------------------------------------------------------------------------------------- files


def save(ranks: list[bytes], folder: Path) -> None:
    """Writes `tiktoken.model` and `tokenizer_config.json`."""
    lines = (base64.b64encode(piece).decode() + f" {i}\n" for i, piece in enumerate(ranks))
    (folder / "tiktoken.model").write_text("".join(lines))
    config = json.dumps(tokenizer_config(len(ranks)), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n")


def tokenizer_config(n_ranks: int) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    named = {
        str(n_ranks + offset): {"content": name, **flags, "special": name not in KEPT_IN_TEXT}
        for offset, name in NAMED_SPECIALS.items()
    }
    return {
        "added_tokens_decoder": named,
        "additional_special_tokens": [
            "<|end_of_msg|>",
            "<|media_begin|>",
            "<|media_content|>",
            "<|media_end|>",
            "<|media_pad|>",
            "<osagent_mode>",
        ],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Reads the file itself: tiktoken's own loader caches by path and would miss a new version."""
    pairs = (line.split() for line in path.read_text().splitlines())
    return {base64.b64decode(piece): int(rank) for piece, rank in pairs}


class Tokenizer:
    """Loads `tiktoken.model`; encodes fragments, decodes ids."""

    def __init__(self, path: Path):
        ranks = _read_ranks(path)
        specials = {
            NAMED_SPECIALS.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i
            for i in range(N_SPECIALS)
        }
        self._encoding = tiktoken.Encoding(
            "k3nano", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self._specials = specials
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; short fragments (tags, names) are remembered."""
        ids = self._cache.get(text)
        if ids is None:
            ids = self._encoding.encode_ordinary(text)
            if len(self._cache) < 50_000:
                self._cache[text] = ids
        return ids

    def encode_fragments(self, fragments: list[Fragment]) -> tuple[list[int], list[bool]]:
        """Ids, and for each id whether the model should learn to produce it."""
        ids: list[int] = []
        learn: list[bool] = []
        for fragment in fragments:
            text = fragment.text
            part = [self._specials[text]] if fragment.special else self.encode(text)
            ids += part
            learn += [fragment.learn] * len(part)
        return ids, learn

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)
