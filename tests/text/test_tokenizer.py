""""""

import json
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from headrace.expressions import MAX_WAYS
from headrace.text import tokenizer as segments
from headrace.text.tokenizer import (
    MAX_PARTS,
    SHORT_CHARACTERS,
    Segments,
    Tokenizer,
    TokenizerError,
    may_take_long,
)
from tests.text.vocabularies import byte_fallback, byte_level, metaspace, word_piece


def write_folder(folder: Path, tokenizer: Tokenizer, **files: object) -> Path:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def test_text_survives_a_round_trip() -> None:
    tokenizer = byte_level()
    text = "naïve 😀 text\n\twith   spaces"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_added_by_the_post_processor_and_only_when_asked() -> None:
    tokenizer = byte_fallback()
    with_special = tokenizer.encode("the fox")
    assert with_special[0] == tokenizer.bos_token_id
    assert tokenizer.encode("the fox", add_special_tokens=False) == with_special[1:]


def test_a_batch_is_encoded_like_its_texts_one_by_one() -> None:
    tokenizer = byte_fallback()
    texts = ["the fox", "", "日本 é"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("special", [False, True])
def test_long_texts_are_encoded_like_short_ones(special: bool) -> None:
    tokenizer = byte_fallback()
    long = "日本 é" * SHORT_CHARACTERS
    texts = ["the fox", "", long]
    short, empty, parallel = tokenizer.encode_batch(texts, special)
    assert [short, empty] == [tokenizer.encode(text, special) for text in texts[:2]]
    assert tokenizer.decode(parallel) == long


def test_bos_is_put_first_where_config_asks_and_the_post_processor_does_not(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "add_bos_token": True}
    lacking = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), tokenizer_config=config))
    assert lacking.encode("fox")[0] == lacking.bos_token_id
    assert lacking.encode("fox", add_special_tokens=False) == byte_level().encode("fox")
    having = Tokenizer.from_folder(write_folder(tmp_path, byte_fallback(), tokenizer_config=config))
    assert having.encode("fox") == byte_fallback().encode("fox")  # not twice


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [5, 6]}}, {1, 5, 6}),
        ({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": 8}}, {1, 7}),
        ({"config": {"eos_token_id": 8}}, {1, 8}),
        ({}, {1}),
    ],
)
def test_eos_ids_come_from_the_generation_config_then_the_config(
    tmp_path: Path, files: dict[str, object], expected: set[int]
) -> None:
    spec = {"eos_token": {"content": "</s>", "lstrip": False}}
    folder = write_folder(tmp_path, byte_level(), special_tokens_map=spec, **files)
    assert Tokenizer.from_folder(folder).eos_token_ids == expected


@pytest.mark.parametrize(("added", "eos"), [({}, "<pad>"), ({"added_tokens_decoder": {}}, "</s>")])
def test_special_tokens_map_wins_in_folders_without_a_list_of_added_tokens(
    tmp_path: Path, added: dict[str, object], eos: str
) -> None:
    folder = write_folder(
        tmp_path,
        byte_level(),
        special_tokens_map={"eos_token": "<pad>", "bos_token": "<s>"},
        tokenizer_config={"eos_token": "</s>"} | added,
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token) == (eos, "<s>")


def test_a_named_special_token_is_hidden_even_if_the_file_holds_it_as_a_word(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"eos_token": "x"})
    assert byte_level().backend.token_to_id("x") is not None
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == byte_level().vocab_size
    assert tokenizer.eos_token_id in tokenizer.special_token_ids
    assert tokenizer.decode(tokenizer.encode("fox")) == "fo"


def test_tokens_that_only_the_config_names_are_added_in_the_order_of_their_ids(tmp_path: Path) -> None:
    size = byte_level().vocab_size
    added = {
        str(size): {"content": "<|call|>", "special": True, "lstrip": False, "normalized": False},
        str(size + 9): {"content": "<|far|>", "special": True},  # gets the next id, as in transformers
    }
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"added_tokens_decoder": added})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<|call|>") == [size]
    assert tokenizer.encode("<|far|>") == [size + 1]
    assert tokenizer.vocab_size == size + 2


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "The quick brown fox"
    assert Tokenizer.from_folder(tmp_path).encode(text) == byte_level().encode(text)


def test_ids_outside_the_vocabulary_decode_to_nothing() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode([*tokenizer.encode("fox"), tokenizer.vocab_size + 7]) == "fox"


def test_a_lone_surrogate_is_refused_with_a_reason() -> None:
    with pytest.raises(TokenizerError, match="surrogate"):
        byte_level().encode("bad \ud800 text")


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"expected tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config": {"eos_token_id": "2"}}, r"generation_config\.json: eos_token_id must be"),
        ({"config": {"eos_token_id": 2.0}}, r"/config\.json: eos_token_id must be a token id .*, got 2\.0"),
        ({"config": {"eos_token_id": [1, None]}}, r"/config\.json: eos_token_id must be"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"two": {}}}},
            "added_tokens_decoder must be an object",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": [2]}}, "added_tokens_decoder must be an object"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"9" * 99: {"content": "a"}}}},
            "added_tokens_decoder",
        ),
        ({"tokenizer_config": {"eos_token": 3}}, r"tokenizer_config\.json: eos_token must be a token"),
        ({"tokenizer_config": {"eos_token": {"content": 3}}}, "eos_token must be a token"),
        (
            {"tokenizer_config": {"eos_token": {"content": "a", "lstrip": "no"}}},
            "flags of a token must be true",
        ),
        ({"tokenizer_config": {"extra_special_tokens": "a"}}, "extra_special_tokens must be a list"),
        ({"tokenizer_config": {"additional_special_tokens": [[]]}}, "extra_special_tokens must be a token"),
        (
            {"special_tokens_map": {"additional_special_tokens": 5}},
            "additional_special_tokens must be a list",
        ),
        *(
            ({name: fields}, "valid Unicode")
            for name, fields in (
                ("tokenizer_config", {"eos_token": "\ud800"}),
                ("tokenizer_config", {"image_token": "a\udfff"}),
                ("tokenizer_config", {"extra_special_tokens": ["\ud800"]}),
                ("tokenizer_config", {"added_tokens_decoder": {"3": {"content": "\ud800"}}}),
                ("special_tokens_map", {"pad_token": {"content": "\ud800"}}),
                ("added_tokens", {"\ud800": 500}),
            )
        ),
        ({"added_tokens": {"<a>": "5"}}, r"added_tokens\.json must map tokens to ids"),
        ({"added_tokens": {"<a>": -1}}, r"added_tokens\.json must map tokens to ids"),
    ],
)
def test_malformed_fields_are_named(tmp_path: Path, files: dict[str, object], message: str) -> None:
    folder = write_folder(tmp_path, byte_level(), **files)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(folder)


def test_gpt2_files_are_converted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = json.loads(byte_level().backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"] | {"<|endoftext|>": len(model["vocab"])}))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    text = "The quick brown fox naïve"
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("The quick") == byte_level().encode("The quick")


def test_older_formats_without_transformers_name_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(TokenizerError, match=r"pip install 'headrace\[bench\]'"):
        Tokenizer.from_folder(tmp_path)


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = byte_level()
    texts = [f"The fox number {number} jumps 😀" * 20 for number in range(8)]
    expected = [tokenizer.encode(text) for text in texts]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            tokens = tokenizer.encode(texts[number])
            if tokens != expected[number] or tokenizer.decode(tokens) != texts[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_added_tokens_are_not_special_unless_they_say_so() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.add_tokens([AddedToken("<think>", special=False)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("<think>")) == "<think>"


def small_bpe(**more: object) -> tokenizers.Tokenizer:
    """A byte-level BPE with the tokens of all bytes and of ``ab``."""
    names = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ab"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [("a", "b")])
    )
    backend.pre_tokenizer = more.get("cuts", tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.decoder = tokenizers.decoders.ByteLevel()
    if "normalizer" in more:
        backend.normalizer = more["normalizer"]
    return backend


@pytest.mark.parametrize("text", ["", "abab", "aba", "ü" * 9, "a b", "\n" * 7, "日本語 ab"])
def test_the_fewest_tokens_of_a_text_are_never_more_than_its_tokens(text):
    made = Tokenizer(small_bpe())
    assert -(-len(text) // 2) == made.fewest(text) <= len(made.encode(text))


def test_the_fewest_tokens_are_not_known_where_a_token_may_stand_for_any_length():
    cuts = tokenizers.pre_tokenizers
    for more in (
        {"normalizer": tokenizers.normalizers.Strip()},
        {"cuts": cuts.Sequence([cuts.WhitespaceSplit(), cuts.ByteLevel()])},
        {"cuts": cuts.Sequence([cuts.Split(" ", "removed"), cuts.ByteLevel()])},
    ):
        assert Tokenizer(small_bpe(**more)).fewest("x" * 100) == 0
    wide = small_bpe()
    wide.add_tokens([tokenizers.AddedToken("<w>", lstrip=True)])
    assert Tokenizer(wide).fewest("x" * 100) == 0
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    assert Tokenizer(words).fewest("x" * 100) == 0


KINDS = [byte_level, byte_fallback, metaspace, word_piece]
LONG = "The quick brown fox jumps over the lazy dog. " * 8
PIECES = [
    "<s>",
    "</s>",
    "<pad>",
    "<",
    "/s>",
    " ",
    "\n",
    "the fox",
    "é",
    " \u00a0plain — added",
    "日本 ",
    LONG,
    LONG[1:],
]


def encode(tokenizer: Tokenizer, known: Segments, text: str, scope: str = "") -> list[int]:
    parts = known.cut(text, scope)
    missing = [part.text for part in parts if part.tokens is None]
    return known.join(parts, tokenizer.encode_batch(missing, add_special_tokens=False), scope)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, derandomize=True)
@given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), min_size=1, max_size=4))
def test_in_parts_and_known_is_as_at_once(kind, texts: list[str]) -> None:
    tokenizer = kind()
    known = Segments(tokenizer)
    for text in [*texts, *texts]:
        assert encode(tokenizer, known, text) == tokenizer.encode(text, add_special_tokens=False)


def unknown(known: Segments, text: str, scope: str = "") -> list[str]:
    return [part.text for part in known.cut(text, scope) if part.tokens is None]


def test_a_long_part_is_tokenized_once_for_each_scope() -> None:
    tokenizer = byte_level()
    known = Segments(tokenizer)
    encode(tokenizer, known, f"<s>{LONG}</s><s>one</s>", "a")
    assert unknown(known, f"<s>{LONG}</s><s>other</s>", "a") == ["</s><s>other</s>"]
    assert unknown(known, f"<s>{LONG}</s><s>other</s>", "b") == [f"<s>{LONG}", "</s><s>other</s>"]


def test_what_was_used_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    known = Segments(tokenizer)
    texts = [f"<s>{number}{LONG}" for number in range(3)]
    monkeypatch.setattr(segments, "KEPT_CHARACTERS", 2 * len(texts[0]))
    for text in (texts[0], texts[1], texts[0], texts[2]):
        encode(tokenizer, known, text)
    assert [bool(unknown(known, text)) for text in texts] == [False, True, False]


def test_a_part_that_would_evict_most_others_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    known = Segments(tokenizer)
    monkeypatch.setattr(segments, "LONGEST", len(LONG) - 1)
    text = f"<s>{LONG}</s>"
    assert encode(tokenizer, known, text) == tokenizer.encode(text, add_special_tokens=False)
    assert unknown(known, text) == [text]


def test_a_mark_that_takes_blanks_cuts_nothing() -> None:
    backend = byte_level().backend.from_str(byte_level().backend.to_str())
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    known = Segments(Tokenizer(backend))
    assert unknown(known, f"<s>{LONG}</s>{LONG}") == [f"<s>{LONG}</s>{LONG}"]


@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_that_no_prompt_could_be_searched_for_are_refused(special: bool) -> None:
    for length, refused in ((200, False), (300, True)):
        backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
        backend.add_tokens([AddedToken("<" + "a" * length + ">", special=special)])
        with (
            pytest.raises(TokenizerError, match="has 302 characters, and the limit is 256")
            if refused
            else nullcontext()
        ):
            Tokenizer(backend)


def test_a_long_added_word_is_no_mark() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.add_tokens(["a" * 300, "\n" * 300])
    assert Tokenizer(backend).encode("a" * 300)


@pytest.mark.parametrize("times", [1, SHORT_CHARACTERS])
def test_a_text_that_the_tokenizers_expression_gives_up_on_is_an_error(times: int) -> None:
    described = json.loads(byte_level().backend.to_str())
    described["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(described)))
    with pytest.raises(TokenizerError, match="cannot split this text"):
        tokenizer.encode("a" * 24 + "!" * times)


@pytest.mark.parametrize("files", [("vocab.json", "merges.txt"), ("vocab.txt",), ("tokenizer.model",)])
def test_code_of_a_repository_is_never_run_and_nothing_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]
) -> None:
    def asked(*args: object) -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Own: pass\n")
    contents = {
        "vocab.json": '{"a": 0}',
        "merges.txt": "#version: 0.2",
        "vocab.txt": "[UNK]\na\n",
        "tokenizer.model": "x",
    }
    for name in files:
        (tmp_path / name).write_text(contents[name])
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    )
    named = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(TokenizerError, match=f"{files[0]} cannot be converted") as raised:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def made(*parts: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate("ab!")}, []))
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    if normalizer is not None:
        backend.normalizer = normalizer
    return Tokenizer(backend)


def test_expressions_are_found_in_all_parts() -> None:
    split = pre_tokenizers.Split(Regex("a+"), "isolated")
    assert not may_take_long(made(split, pre_tokenizers.ByteLevel()).backend)
    replace = normalizers.Replace(Regex("(b+)+c"), "x")
    for parts, normalizer in (
        ([split], replace),
        ([split, pre_tokenizers.Split(Regex("(a+)+c"), "removed")], None),
    ):
        assert may_take_long(made(*parts, normalizer=normalizer).backend)


def test_many_expressions_and_many_parts_take_long_together() -> None:
    eight = pre_tokenizers.Split(Regex("a{1,8}b"), "isolated")
    assert not may_take_long(made(*[eight] * (MAX_WAYS // 8)).backend)
    assert may_take_long(made(*[eight] * (MAX_WAYS // 8 + 1)).backend)
    assert may_take_long(made(*[pre_tokenizers.Digits()] * (MAX_PARTS + 1)).backend)


def test_only_a_tokenizer_without_slow_expressions_encodes_on_the_calling_thread() -> None:
    plain = made(pre_tokenizers.Split(Regex("a+|b"), "isolated"))
    slow = made(pre_tokenizers.Split(Regex("(a+)+$"), "isolated"))
    assert plain.is_short(SHORT_CHARACTERS)
    assert not plain.is_short(SHORT_CHARACTERS + 1)
    assert not slow.is_short(1)
    assert plain.encode("aab") == slow.encode("aab") == [0, 0, 1]


def test_a_slow_expression_does_not_hold_the_interpreter() -> None:
    """While one thread searches, another must run: the texts are short, and one takes some tenths of a second."""
    slow = made(pre_tokenizers.Split(Regex("(a+)+$"), "isolated"))
    begun, turns = threading.Event(), 0

    def work() -> None:
        begun.set()
        for length in range(14, 20):
            slow.encode("a" * length + "!")

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    while thread.is_alive():
        turns += 1
        thread.join(0.0005)
    assert turns > 3
