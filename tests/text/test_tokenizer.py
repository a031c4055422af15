"""Tokenizer goldens, damaged files, long inputs, and text that is none."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3serve.errors import CheckpointError, RequestError
from k3serve.text import tokenizer as module
from k3serve.text.tokenizer import Tokenizer, TokenizerLike, check_text, split_long
from tests.text.byte_tokenizer import ByteTokenizer
from tests.text.conftest import DATA, goldens

ENCODE = goldens("tokenizer_tiny/encode_goldens.json")
DECODE = goldens("tokenizer_tiny/decode_goldens.json")


@pytest.mark.parametrize("golden", [g for g in ENCODE if "text" in g], ids=lambda g: g["text"][:20])
def test_encode_goldens(tiny: Tokenizer, golden: dict[str, Any]) -> None:
    assert tiny.encode(golden["text"]) == golden["content_ids"]
    assert tiny.encode(golden["text"], allow_special=True) == golden["with_specials_ids"]
    assert tiny.decode(golden["content_ids"]) == golden["text"]


@pytest.mark.parametrize("golden", [g for g in ENCODE if "repeat" in g], ids=lambda g: g["n_ids"])
def test_long_inputs_are_split_as_the_release_does(tiny: Tokenizer, golden: dict[str, Any]) -> None:
    ids = tiny.encode(golden["text_unit"] * golden["repeat"] + golden["tail"])
    assert len(ids) == golden["n_ids"]
    digest = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()
    assert digest == golden["sha256_of_ids_joined_by_space"]


@pytest.mark.parametrize("golden", DECODE, ids=lambda g: g["text"][:20])
def test_decode_goldens(tiny: Tokenizer, golden: dict[str, Any]) -> None:
    ids = golden["ids"]
    assert tiny.decode(ids) == golden["text"]
    assert tiny.decode(ids, skip_special=True) == golden["text_skipping_special"]
    pieces = [base64.b64decode(p) for p in golden["pieces_base64"]]
    assert [tiny.token_bytes(i) for i in ids] == pieces
    assert [tiny.token_text(i) for i in ids] == [p.decode("utf-8", "replace") for p in pieces]


def _split_by_definition(text: str) -> list[str]:
    """Character by character, with the limits as the module has them now."""
    pieces = []
    for begin in range(0, len(text), module.PIECE_CHARS):
        piece = text[begin : begin + module.PIECE_CHARS]
        start = run = 0
        for i, char in enumerate(piece):
            same = i > 0 and char.isspace() == piece[i - 1].isspace()
            run = run + 1 if same else 1
            if run > module.RUN_CHARS:
                pieces.append(piece[start:i])
                start, run = i, 1
        pieces.append(piece[start:])
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 25_000,
        "a" * 75_001 + " b",
        " \t\u00a0" * 9_000 + "x" * 60_000,
        "ab " * 150_000,
        " " * 399_990 + "a" * 30_000,
    ],
    ids=len,
)
def test_split_long_equals_its_definition(text: str) -> None:
    assert [p for p in split_long(text) if p] == [p for p in _split_by_definition(text) if p]


def test_special_ids_are_the_last_256(tiny: Tokenizer) -> None:
    assert tiny.vocab_size == 1536 + 256
    assert tiny.special_id("[BOS]") == 1536 and tiny.special_id("[PAD]") == 1791
    assert tiny.special_id("<|reserved_token_1544|>") == 1544
    assert len(tiny.named_special_ids) == 16 and 1544 not in tiny.named_special_ids.values()
    assert tiny.eos_ids == (1538, 1537)
    assert tiny.is_special(1538) and not tiny.is_special(1539) and not tiny.is_special(1544)
    assert tiny.encode(tiny.eos_token or "", allow_special=True) == [1537]


@pytest.mark.parametrize("token_id", [-1, 1792])
def test_ids_outside_the_vocabulary_have_no_bytes(tiny: Tokenizer, token_id: int) -> None:
    with pytest.raises(IndexError):
        tiny.token_bytes(token_id)


def test_info_has_what_clients_read_and_no_code_reference(tiny: Tokenizer) -> None:
    info = tiny.info()
    assert {k: info[k] for k in ("bos_token", "eos_token", "pad_token", "chat_template")} == {
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "chat_template": None,
    }
    assert info["tokenizer_class"] == "TikTokenTokenizer" and "auto_map" not in info
    json.dumps(info)


MARKERS = st.sampled_from(["<|open|>", "<|close|>", "<|sep|>", "[EOS]", "<|reserved_token_1544|>"])
TEXT = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | MARKERS).map(
    "".join
)


@given(TEXT)
def test_text_never_yields_special_ids_and_round_trips(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert all(i < 1536 for i in ids)
    assert tiny.decode(ids) == text
    assert tiny.decode(tiny.encode(text, allow_special=True)) == text


def test_byte_tokenizer_follows_the_protocol() -> None:
    double: TokenizerLike = ByteTokenizer()
    ids = double.encode("né[EOS]<|sep|>", allow_special=True)
    assert ids == [110, 195, 169, 257, 261]
    assert double.decode(ids) == "né[EOS]<|sep|>"
    assert double.decode(ids, skip_special=True) == "né<|sep|>"
    assert double.encode("[EOS]") == list(b"[EOS]")


# ------------------------------------------------------------ mistakes of a request


@pytest.mark.parametrize("text", ["\ud83d", "ab\udc4b", "\udc4b\ud83d"])
def test_lone_surrogates_are_a_400_that_can_be_printed(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_text(text, "messages[0].content")
    assert caught.value.status == 400 and caught.value.param == "messages[0].content"
    caught.value.message.encode("ascii")


def test_text_without_lone_surrogates_passes() -> None:
    assert check_text("naïve 👋", "prompt") == "naïve 👋"


# ------------------------------------------------------------ damaged files

Damage = Callable[[Path], None]


def _edit(change: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return damage


def _write(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text) and None


def _ranks(change: Callable[[list[str]], list[str]]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "tiktoken.model"
        path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")

    return damage


def _entry(name: str) -> dict[str, Any]:
    return {"content": name, "special": True}


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no ranks": (lambda f: (f / "tiktoken.model").unlink(), "tiktoken.model"),
    "no config": (lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer_config.json"),
    "lfs pointer": (_write("tiktoken.model", "version https://git-lfs\n"), "tiktoken.model"),
    "truncated": (_ranks(lambda lines: lines[:100]), "tiktoken.model"),
    "rank left out": (_ranks(lambda lines: lines[:300] + lines[301:]), "line 301"),
    "token repeated": (_ranks(lambda lines: [*lines[:-1], "IQ== 1535"]), "line 1536"),
    "not json": (_write("tokenizer_config.json", "{"), "tokenizer_config.json"),
    "a json list": (_write("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "no names": (_edit(lambda c: c.pop("added_tokens_decoder")), "added_tokens_decoder"),
    "other vocabulary": (
        _edit(lambda c: c["added_tokens_decoder"].update({"163586": _entry("x")})),
        "163586",
    ),
    "name twice": (
        _edit(lambda c: c["added_tokens_decoder"].update({"1700": _entry("[EOS]")})),
        "twice",
    ),
    "reserved name": (
        _edit(
            lambda c: c["added_tokens_decoder"].update({"1700": _entry("<|reserved_token_1701|>")})
        ),
        "reserved",
    ),
    "end id outside": (_write("generation_config.json", '{"eos_token_id": 1792}'), "eos_token_id"),
    "end id no int": (_write("config.json", '{"eos_token_id": [true]}'), "eos_token_id"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(DATA / "tokenizer_tiny" / name, tmp_path / name)
        (tmp_path / name).chmod(0o644)
    return tmp_path


@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_files_are_named(folder: Path, damage: Damage, named: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(folder)
    assert named in str(caught.value) and str(folder) in str(caught.value)


def test_end_ids_come_from_the_checkpoint_first(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1545, 1538]}')
    assert Tokenizer.load(folder).eos_ids == (1545, 1538, 1537)


def test_a_checkpoint_with_other_special_names_loads(folder: Path) -> None:
    """Kimi-Linear has the ids, but not the markers of K3's chats."""
    _edit(lambda c: c.update(added_tokens_decoder={"1537": _entry("[EOS]")}))(folder)
    loaded = Tokenizer.load(folder)
    assert loaded.eos_ids == (1537,) and loaded.special_id("<|reserved_token_1539|>") == 1539
