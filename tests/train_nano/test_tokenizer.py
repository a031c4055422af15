"""The tokenizer trainer, its files, and fragment-wise encoding."""

import json
from pathlib import Path

import pytest

from scripts.train_nano import sampling, spec, tokenizer, xtml
from scripts.train_nano.samples import Sample, assistant, user

TEXTS = ["the cat sat on the mat", "the hat 1234 of the cat's friend", "message role user"] * 3
SIZE = 270  # ranks of the small tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tokenizer.Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tokenizer.train_ranks(TEXTS, SIZE), folder)
    return tokenizer.Tokenizer(folder / "tiktoken.model")


def test_training_merges_the_most_frequent_pair_first() -> None:
    ranks = tokenizer.train_ranks(["ababab ababab", "abc"], 258)
    assert ranks[:256] == [bytes([b]) for b in range(256)]
    assert ranks[256:] == [b"ab", b"abab"]


def test_training_stops_when_nothing_repeats() -> None:
    assert len(tokenizer.train_ranks(["xyz"], 300)) == 256


def test_no_piece_holds_a_digit_beside_something_else() -> None:
    ranks = tokenizer.train_ranks(TEXTS, 300)
    assert not [p for p in ranks if len(p) > 1 and any(chr(b).isdigit() for b in p)]


@pytest.mark.parametrize(
    "text",
    [
        "the cat's hat",
        "héllo wörld ☃ 你好 👋",
        "1234567 \n\n  tabs\t x=1.5;",
        "<|open|> and [BOS] as text",
        "",
    ],
)
def test_text_comes_back(small: tokenizer.Tokenizer, text: str) -> None:
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert all(i < SIZE for i in ids), "text became a special token"


def test_digits_stay_apart(small: tokenizer.Tokenizer) -> None:
    assert small.encode("1234") == [ord(c) for c in "1234"]


def test_markers_become_single_special_ids(small: tokenizer.Tokenizer) -> None:
    sample = Sample("x", "off", (user("<|open|>"), assistant("cat")))
    fragments = xtml.render(sample)
    ids, learn = small.encode_fragments(fragments)
    assert len(ids) == len(learn)
    assert ids.count(SIZE + 3) == sum(f.special and f.text == "<|open|>" for f in fragments) == 3
    assert small.decode(ids) == xtml.text_of(fragments)


def test_config_names_the_specials_of_k3() -> None:
    named = tokenizer.tokenizer_config(spec.N_RANKS)["added_tokens_decoder"]
    assert len(named) == 16
    assert named["2050"]["content"] == "<|end_of_msg|>" and named["2050"]["special"]
    assert named["2303"]["content"] == "[PAD]"
    kept = [entry["content"] for entry in named.values() if not entry["special"]]
    assert kept == ["<|open|>", "<|close|>", "<|sep|>"]


def test_shipped_tokenizer_keeps_the_curriculum(request: pytest.FixtureRequest) -> None:
    folder = Path(request.config.rootpath) / "k3serve/assets/nano"
    shipped = tokenizer.Tokenizer(folder / "tiktoken.model")
    stream = sampling.SampleStream(7, sampling.MIXES["full"])
    for _ in range(300):
        fragments = xtml.render(next(stream))
        ids, _ = shipped.encode_fragments(fragments)
        assert shipped.decode(ids) == xtml.text_of(fragments)
        assert max(ids) < spec.VOCAB_SIZE
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config == tokenizer.tokenizer_config(spec.N_RANKS)
