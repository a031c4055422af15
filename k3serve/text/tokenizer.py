"""The tokenizer of the Kimi family: tiktoken byte-pair ranks plus 256 special ids behind them.

Rule: `encode` yields special ids only when asked with allow_special=True; checkpoint code is never
run, only `tiktoken.model` and the JSON files are read.

Try it: Tokenizer.load(Path("tests/data/tokenizer_tiny")).encode("The quick brown fox")
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tiktoken

from k3serve.errors import CheckpointError, RequestError
from k3serve.text.show import shown

log = logging.getLogger("k3serve")

NUM_SPECIALS = 256
PIECE_CHARS = 400_000  # longer texts are cut here, and merges do not cross the cut
RUN_CHARS = 25_000  # so are longer runs of only whitespace or only non-whitespace

# A whole over-long run. The lookbehind lets a match start at a run's first character only: each run
# is read once.
_LONG_RUN = re.compile(
    rf"(?<!\s)\s{{{RUN_CHARS + 1},}}|(?<!\S)\S{{{RUN_CHARS + 1},}}",
)

_LETTERS_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LETTERS_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS_UPPER}*{_LETTERS_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS_UPPER}+{_LETTERS_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class TokenizerLike(Protocol):
    """What the rest of the server needs: `Tokenizer`, or the byte tokenizer of the tests."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def named_special_ids(self) -> Mapping[str, int]: ...

    @property
    def bos_token(self) -> str | None: ...

    @property
    def eos_token(self) -> str | None: ...

    @property
    def pad_token(self) -> str | None: ...

    def encode(self, text: str, allow_special: bool = False) -> list[int]: ...

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def is_special(self, token_id: int) -> bool: ...

    def special_id(self, name: str) -> int: ...

    def info(self) -> dict[str, Any]: ...


def check_text(text: str, param: str) -> str:
    """The text itself, or a 400 naming `param` when it holds half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} holds the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is no Unicode text: send the whole pair or leave it out",
            param=param,
            code="invalid_unicode",
        ) from None
    return text


def split_long(text: str) -> Iterator[str]:
    """The pieces that are encoded apart: at most PIECE_CHARS, with no run over RUN_CHARS."""
    for begin in range(0, len(text), PIECE_CHARS):
        piece = text[begin : begin + PIECE_CHARS]
        start = 0
        for run in _LONG_RUN.finditer(piece) if len(piece) > RUN_CHARS else ():
            for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                yield piece[start:cut]
                start = cut
        yield piece[start:]


@dataclass(frozen=True, slots=True)
class _Specials:
    """The last 256 ids, from added_tokens_decoder."""

    names: Mapping[str, int]  # all 256, reserved ones included
    named: Mapping[str, int]  # those that the file names
    flagged: frozenset[int]  # those that a detokeniser may skip


class Tokenizer:
    """One checkpoint's tokenizer. Immutable and thread-safe."""

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        specials: _Specials,
        config: Mapping[str, Any],
        eos_ids: tuple[int, ...],
    ) -> None:
        self._specials = specials
        self._config = config
        self._eos_ids = eos_ids
        self._pieces: tuple[bytes, ...] = tuple(sorted(ranks, key=ranks.__getitem__)) + tuple(
            name.encode() for name in sorted(specials.names, key=specials.names.__getitem__)
        )
        self._encoding = tiktoken.Encoding(
            "k3", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=dict(specials.names)
        )

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads tiktoken.model and tokenizer_config.json; end ids from (generation_)config.json.

        Raises CheckpointError naming the file when one is missing or is not what it should be.
        """
        ranks = _read_ranks(directory / "tiktoken.model")
        config_path = directory / "tokenizer_config.json"
        config = _read_json(config_path)
        specials = _read_specials(config_path, config, first=len(ranks))
        return cls(ranks, specials, config, _read_eos_ids(directory, config, specials, len(ranks)))

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a message, the checkpoint's own first."""
        return self._eos_ids

    @property
    def named_special_ids(self) -> Mapping[str, int]:
        return self._specials.named

    @property
    def bos_token(self) -> str | None:
        return _token_name(self._config.get("bos_token"))

    @property
    def eos_token(self) -> str | None:
        return _token_name(self._config.get("eos_token"))

    @property
    def pad_token(self) -> str | None:
        return _token_name(self._config.get("pad_token"))

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of the text; names of special tokens are plain text unless allow_special."""
        ids: list[int] = []
        for piece in split_long(text):
            if allow_special:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of the ids, invalid UTF-8 as U+FFFD.

        Skipping drops only ids that are flagged special: <|open|>, <|close|> and <|sep|> stay.
        """
        skipped = self._specials.flagged if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 0:  # a tuple would count from its end
            raise IndexError(f"token id {token_id} is negative")
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """One token alone; bytes that are no complete character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the id is flagged special, i.e. dropped by a detokeniser that skips specials."""
        return token_id in self._specials.flagged

    def special_id(self, name: str) -> int:
        """Id of a special token by its name, reserved ones included. Raises KeyError."""
        return self._specials.names[name]

    def info(self) -> dict[str, Any]:
        """The tokenizer_config fields that GET /tokenizer_info shows."""
        fields = {k: v for k, v in self._config.items() if k != "auto_map"}
        fields |= {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "chat_template": None,  # the chat format is code, not a template
            "tokenizer_class": self._config.get("tokenizer_class", "TikTokenTokenizer"),
        }
        return fields


def load_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None where it ships none (token-id prompts still work)."""
    if not (checkpoint / "tiktoken.model").exists():
        log.warning("%s has no tiktoken.model: only token-id prompts will work", checkpoint)
        return None
    return Tokenizer.load(checkpoint)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); the checkpoint folder must hold the "
            f"tokenizer files tiktoken.model and tokenizer_config.json"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not valid JSON ({error}); copy the file again from the checkpoint"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds a {type(value).__name__} where a JSON object is expected; "
            f"copy the file again from the checkpoint"
        )
    return value


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            piece = base64.b64decode(token, validate=True)
            value = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{path}: line {number} is {shown(line)}, not 'BASE64 RANK'; the file is damaged "
                f"or no rank file (a Git LFS pointer?): copy it again from the checkpoint"
            ) from None
        if value != len(ranks) or piece in ranks or not piece:
            raise CheckpointError(
                f"{path}: line {number} has rank {value} where {len(ranks)} is expected, or its "
                f"token is empty or repeated; the file is damaged: copy it again"
            )
        ranks[piece] = value
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of the 256 single bytes have no token (first: "
            f"{missing[0]:#04x}); the file is truncated: copy it again from the checkpoint"
        )
    return ranks


def _read_specials(path: Path, config: Mapping[str, Any], first: int) -> _Specials:
    table = config.get("added_tokens_decoder")
    if not isinstance(table, dict):
        raise CheckpointError(
            f"{path}: added_tokens_decoder is missing; it names the special tokens"
        )
    named: dict[str, int] = {}
    flagged = set()
    for key, entry in table.items():
        name = _token_name(entry)
        if not key.isdecimal() or not first <= int(key) < first + NUM_SPECIALS or not name:
            raise CheckpointError(
                f"{path}: added_tokens_decoder[{key!r}] must be a token name with an id from "
                f"{first} to {first + NUM_SPECIALS - 1} (the 256 ids behind tiktoken.model): "
                f"the two files are of different checkpoints"
            )
        if name in named:
            raise CheckpointError(
                f"{path}: added_tokens_decoder names {name!r} twice ({named[name]} and {key}); "
                f"copy the file again from the checkpoint"
            )
        named[name] = int(key)
        if isinstance(entry, dict) and entry.get("special"):
            flagged.add(int(key))
    by_id = {token_id: name for name, token_id in named.items()}
    names = {by_id.get(i, f"<|reserved_token_{i}|>"): i for i in range(first, first + NUM_SPECIALS)}
    if len(names) != NUM_SPECIALS:
        raise CheckpointError(
            f"{path}: added_tokens_decoder gives one id the reserved name of another; "
            f"copy the file again from the checkpoint"
        )
    return _Specials(names=names, named=named, flagged=frozenset(flagged))


def _read_eos_ids(
    directory: Path, config: Mapping[str, Any], specials: _Specials, first: int
) -> tuple[int, ...]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = _read_json(path).get("eos_token_id") if path.exists() else None
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token_id) is not int or not 0 <= token_id < first + NUM_SPECIALS:
                raise CheckpointError(
                    f"{path}: eos_token_id {shown(token_id)} is no id of this tokenizer "
                    f"(0 to {first + NUM_SPECIALS - 1}); correct the file"
                )
            found.append(token_id)
    for end in ("<|end_of_msg|>", _token_name(config.get("eos_token")) or ""):
        if end in specials.names:
            found.append(specials.names[end])
    return tuple(dict.fromkeys(found))


def _token_name(entry: object) -> str | None:
    """A token as the files write it: a string, or an object with its content."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None
